"""LayeredStep: a step as several small programs, of which layers that are alike share one.

It compiles and loads in a fraction of the time of the whole step, and computes the same. But each
layer is a call from Python, so the program of the whole step takes its place later.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, Var, jaxpr_as_fun

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
    """

    calls: tuple[ProgramCall, ...]
    constants: tuple[Any, ...]
    results: tuple[int, ...]
    num_slots: int
    out_tree: Any
    sampled: Any = None


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
        for call in self.calls.calls:
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
        numbers: dict[int, int] = {}  # of pieces, by the function that they call
        calls: list[ProgramCall] = []
        for number, equations in enumerate(self._pieces):
            function, takes, gives = self._function(equations, number)
            first = equations[0]
            same = id(first.params["jaxpr"] if _is_shared(first) else equations)
            if same not in numbers:
                numbers[same] = len(pieces)
                shapes = tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in takes)
                pieces.append(StepPiece(function, shapes, ()))
            calls.append(self._call(numbers[same], number, takes, gives))
        for at, piece in enumerate(pieces):
            gives = jax.eval_shape(piece.function, *piece.shapes)
            piece.donated = _with_results(piece.shapes, sorted(self._donated[at]), gives)
        constants = (*self._traced.jaxpr.consts, *(literal.val for literal in literals))
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
        if _is_shared(first):
            return _named(first.params["jaxpr"], first.params["name"]), first.invars, first.outvars
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
        return _named(ClosedJaxpr(own, ()), "enginebay_between_layers"), takes, gives

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
    """Yield all equations in order: each shared call alone, and what is between two of them."""
    between: list[Any] = []
    for equation in equations:
        if not _is_shared(equation):
            between.append(equation)
            continue
        if between:
            yield between
        yield [equation]
        between = []
    if between:
        yield between


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
