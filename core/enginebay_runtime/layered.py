"""LayeredStep: a step as several small programs, of which groups of equal layers share one.

It compiles and loads in a fraction of the time and of the memory of the whole step, and computes
the same. Each group of layers is a call from Python, which is nothing beside a long prefill on a
CPU. Other steps are so short that the program of the whole step takes its place.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal, Var, jaxpr_as_fun

from enginebay.ops.bound import LAYER_CALL
from enginebay_runtime.step import SAMPLING_CALL

SHARED_CALLS = (LAYER_CALL, SAMPLING_CALL)
"""The functions that become programs of their own."""


@dataclasses.dataclass(frozen=True)
class ProgramCall:
    """A call of one of the programs: the slots of its arguments and of its results, and the slots
    that no later call reads.
    """

    program: int
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    freed: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class ProgramCalls:
    """The calls of a step in order. Their values are in numbered slots: first the arguments of the
    step, then `constants`. `results`: the slots of the step's results. `sampled`: of
    one step of a decode, the shapes of the results that it gets from the step before it.
    `is_final`: whether the program of the whole step is not to take its place. `waits`: whether
    each call waits for the one before it.
    """

    calls: tuple[ProgramCall, ...]
    constants: tuple[Any, ...]
    results: tuple[int, ...]
    num_slots: int
    out_tree: Any
    sampled: Any = None
    is_final: bool = False
    waits: bool = False


@dataclasses.dataclass
class StepPiece:
    """A program before it is compiled: a function of arrays, the shapes of its arguments, and the
    places of the arguments that it may overwrite.
    """

    function: Callable[..., Any]
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    donated: tuple[int, ...]

    def lower(self) -> Any:
        """Return the lowered program."""
        return jax.jit(self.function, donate_argnums=self.donated).lower(*self.shapes)


class LayeredStep:
    """The compiled programs of a step, called one after the other."""

    def __init__(self, calls: ProgramCalls, programs: Sequence[Callable[..., Any]]) -> None:
        self.calls, self.programs = calls, tuple(programs)

    def __call__(self, *arguments: Any) -> Any:
        """Run the step, as the program of the whole step does."""
        sampled = self.calls.sampled
        if sampled is None:
            return self._run(*arguments)
        weights, state, changes, inputs = arguments
        sampled = jax.tree.map(lambda array: np.zeros(array.shape, array.dtype), sampled)
        for number in range(int(inputs.num_steps)):
            given = weights, state, changes, inputs, np.int32(number), sampled
            state, sampled = self._run(*given)
        return state, sampled

    def _run(self, *arguments: Any) -> Any:
        slots: list[Any] = [*jax.tree.leaves(arguments), *self.calls.constants]
        slots += [None] * (self.calls.num_slots - len(slots))
        values: Sequence[Any] = ()
        for call in self.calls.calls:
            if self.calls.waits:
                jax.block_until_ready(values)
            values = self.programs[call.program](*[slots[i] for i in call.arguments])
            for i in call.freed:
                slots[i] = None
            for i, value in zip(call.results, values, strict=True):
                slots[i] = value
        return jax.tree.unflatten(self.calls.out_tree, [slots[i] for i in self.calls.results])


def split_step(traced: Any, sampled: Any = None) -> tuple[ProgramCalls, list[StepPiece]] | None:
    """Split a step that `jax.jit(...).trace(...)` has traced at its SHARED_CALLS; None for a step
    without any. `sampled`: as that of ProgramCalls.
    """
    names = {equation.params.get("name") for equation in traced.jaxpr.eqns}
    return None if names.isdisjoint(SHARED_CALLS) else _Split(traced).result(sampled)


MIN_LAYERS = 8
"""The program of a whole step with fewer layers compiles nearly as fast as its parts."""

MAX_LAYER_CALLS = 8
"""At most this many calls for layers that follow each other. A call takes about 0.2 ms on a CPU."""

CALL_COST = 1
"""One more call costs as much as compiling this many more layers."""


class _Split:
    """One split: what each piece takes and gives, and which memory it may overwrite."""

    def __init__(self, traced: Any) -> None:
        self._traced = traced
        self._jaxpr = traced.jaxpr.jaxpr
        self._pieces = list(_pieces(self._jaxpr.eqns))
        donated = [leaf.donated for leaf in jax.tree.leaves(traced.args_info)]
        given = zip(self._jaxpr.invars, donated, strict=True)
        self._owned = {var for var, is_donated in given if is_donated}
        """Values whose memory belongs to the step: what was donated to it, and its own results."""
        self._last: dict[Var, int] = {}
        """The number of the last piece that reads a value."""
        for number, piece in enumerate(self._pieces):
            self._last |= dict.fromkeys(_read(piece), number)
        self._last |= dict.fromkeys(_variables(self._jaxpr.outvars), len(self._pieces))
        self._slots: dict[Any, int] = {}
        self._donated: dict[int, set[int]] = {}

    def result(self, sampled: Any) -> tuple[ProgramCalls, list[StepPiece]]:
        literals = [out for out in self._jaxpr.outvars if isinstance(out, Literal)]
        for var in (*self._jaxpr.invars, *self._jaxpr.constvars, *map(id, literals)):
            self._slots[var] = len(self._slots)
        pieces: list[StepPiece] = []
        numbers: dict[Hashable, int] = {}  # of pieces, by what they compute
        calls: list[ProgramCall] = []
        for number, equations in enumerate(self._pieces):
            function, takes, gives = self._function(equations, number)
            same = _form(equations, takes, gives) if _is_shared(equations[0]) else number
            if same not in numbers:
                numbers[same] = len(pieces)
                shapes = tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in takes)
                pieces.append(StepPiece(function, shapes, ()))
            calls.append(self._call(numbers[same], number, takes, gives))
        for at, piece in enumerate(pieces):
            gives = jax.eval_shape(piece.function, *piece.shapes)
            piece.donated = _with_results(piece.shapes, sorted(self._donated[at]), gives)
        constants = (
            *map(_plain_array, self._traced.jaxpr.consts),
            *map(_literal_array, literals),
        )
        results = tuple(
            self._slots[id(out) if isinstance(out, Literal) else out] for out in self._jaxpr.outvars
        )
        num, tree = len(self._slots), self._traced.out_tree
        return ProgramCalls(tuple(calls), constants, results, num, tree, sampled), pieces

    def _function(
        self, equations: Sequence[Any], number: int
    ) -> tuple[Callable[..., Any], list[Any], list[Any]]:
        """The function of a piece, what it takes and what it gives."""
        first = equations[0]
        if _is_shared(first) and len(equations) == 1:
            return _named(first.params["jaxpr"], first.params["name"]), first.invars, first.outvars
        name = "enginebay_layers" if _is_shared(first) else "enginebay_between_layers"
        takes = _read(equations)
        made = [out for equation in equations for out in equation.outvars]
        gives = [out for out in made if self._last.get(out, number) > number]
        own = self._jaxpr.replace(
            constvars=[],
            invars=takes,
            outvars=gives,
            eqns=equations,
            debug_info=self._jaxpr.debug_info.with_unknown_names(),
        )
        closed = self._traced.jaxpr.replace(jaxpr=own, consts=())
        return _named(closed, name), takes, gives

    def _call(self, program: int, number: int, takes: list[Any], gives: list[Any]) -> ProgramCall:
        count = collections.Counter(takes)
        ended = {var for var in takes if self._last[var] == number}
        able = {i for i, v in enumerate(takes) if v in self._owned & ended and count[v] == 1}
        self._donated[program] = self._donated.get(program, able) & able
        for var in gives:
            self._slots.setdefault(var, len(self._slots))
        self._owned |= set(gives)
        return ProgramCall(
            program,
            tuple(self._slots[var] for var in takes),
            tuple(self._slots[var] for var in gives),
            tuple(self._slots[var] for var in ended),
        )


def _is_shared(equation: Any) -> bool:
    """Whether an equation becomes a program of its own."""
    return equation.params.get("name") in SHARED_CALLS and not any(
        isinstance(value, Literal) for value in equation.invars
    )


def _pieces(equations: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield all equations in order: groups of layers, another shared call alone, and what is
    between two of them.
    """
    for kind, found in itertools.groupby(equations, _kind):
        run = list(found)
        if kind == LAYER_CALL:
            yield from _groups(run)
        elif kind is None:
            yield run
        else:
            yield from ([one] for one in run)


def _kind(equation: Any) -> str | None:
    """The name of a call that becomes a program of its own; None for another equation."""
    return equation.params["name"] if _is_shared(equation) else None


def _groups(layers: Sequence[Any]) -> list[list[Any]]:
    """Cut consecutive layers into at most MAX_LAYER_CALLS groups, in such a way that they are few,
    and the different groups have few layers, because each of them is compiled once.
    """

    def cut(size: int, first: int) -> list[list[Any]]:
        starts = [0, *range(first, len(layers), size)] if first else range(0, len(layers), size)
        ends = [*starts[1:], len(layers)]
        return [list(layers[a:b]) for a, b in zip(starts, ends, strict=True)]

    def cost(groups: Sequence[Sequence[Any]]) -> int:
        forms = {tuple(id(layer.params["jaxpr"]) for layer in group) for group in groups}
        return sum(map(len, forms)) + CALL_COST * len(groups)

    smallest = -(-len(layers) // MAX_LAYER_CALLS)
    found = [cut(n, first) for n in range(smallest, len(layers) + 1) for first in range(n)]
    return min((each for each in found if len(each) <= MAX_LAYER_CALLS), key=cost)


def _form(equations: Sequence[Any], takes: Sequence[Any], gives: Sequence[Any]) -> Hashable:
    """What two groups of calls have in common that compute the same: the functions, and which of
    their values go where.
    """
    numbers: dict[Any, int] = {}
    for value in (*takes, *(out for equation in equations for out in equation.outvars)):
        numbers.setdefault(value, len(numbers))
    calls = tuple(
        (id(e.params["jaxpr"]), *(numbers[value] for value in e.invars)) for e in equations
    )
    return calls, tuple(numbers[value] for value in gives)


def _plain_array(constant: Any) -> Any:
    """A constant that can be stored: JAX's own kind of NumPy array does not survive pickle."""
    return constant if isinstance(constant, jax.Array) else np.asarray(constant)


def _literal_array(literal: Any) -> np.ndarray:
    """The value of a literal, with its dtype: a Python number would get another one."""
    return np.asarray(literal.val, literal.aval.dtype)


def _variables(values: Sequence[Any]) -> list[Any]:
    return [value for value in values if not isinstance(value, Literal)]


def _read(equations: Sequence[Any]) -> list[Any]:
    """The variables that equations read and do not make, each once."""
    made = {out for equation in equations for out in equation.outvars}
    read = (var for equation in equations for var in _variables(equation.invars))
    return [var for var in dict.fromkeys(read) if var not in made]


def _named(closed: Any, name: str) -> Callable[..., Any]:
    """A function that computes a jaxpr; profiles and compile logs show the name."""
    function: Callable[..., Any] = jaxpr_as_fun(closed)

    def run(*values: Any) -> Any:
        return function(*values)

    run.__name__ = name
    return run


def _with_results(
    shapes: Sequence[jax.ShapeDtypeStruct], able: Sequence[int], gives: Sequence[Any]
) -> tuple[int, ...]:
    """The places of the arguments in `able` whose memory a result of the same shape can take."""
    free = collections.Counter((a.shape, a.dtype) for a in gives)
    taken = []
    for place in able:
        like = shapes[place].shape, shapes[place].dtype
        if free[like]:
            free[like] -= 1
            taken.append(place)
    return tuple(taken)
