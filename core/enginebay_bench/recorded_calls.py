"""Records the calls of ops that a model makes, with their arguments, and times each sort alone."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.ops.caps import LAYER

MAX_TIMED_CALLS = 32
"""Max calls in the program that times calls of one sort."""

MAX_SETS = 16
"""Max copies of the arrays of a sort of calls."""

SAMPLE_S = 0.002

_Static = Hashable


@dataclasses.dataclass(frozen=True)
class _Form:
    """What all calls of one sort have in common: the structure of their arguments, and those that
    are no arrays. An array has None in `statics`, and its shape and dtype in `arrays`.
    """

    tree: Any
    statics: tuple[_Static, ...]
    is_array: tuple[bool, ...]
    arrays: tuple[tuple[tuple[int, ...], str], ...]

    @staticmethod
    def of(leaves: Sequence[Any], tree: Any) -> _Form:
        """Return the form of flat arguments."""
        is_array = tuple(isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves)
        pairs = list(zip(leaves, is_array, strict=True))
        statics = tuple(None if array else leaf for leaf, array in pairs)
        arrays = tuple((leaf.shape, str(leaf.dtype)) for leaf, array in pairs if array)
        return _Form(tree, statics, is_array, arrays)

    def arguments(self, arrays: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments and keywords of a call with these arrays."""
        rest = iter(arrays)
        leaves = [
            next(rest) if array else static
            for static, array in zip(self.statics, self.is_array, strict=True)
        ]
        positional, keywords = jax.tree.unflatten(self.tree, leaves)
        return positional, keywords


@dataclasses.dataclass(frozen=True)
class RecordedCall:
    """One call of an op, with the arrays that it got."""

    op: str
    form: _Form
    arrays: tuple[jax.Array, ...]

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional arguments, and the keywords."""
        return self.form.arguments(self.arrays)


@dataclasses.dataclass
class CallRecorder:
    """Stands in for each implementation of an op (`Ops.wrapped`) while `run` traces a model, and
    keeps the calls in their order.

    `same_layers`: no implementation reads the number of the layer (`Ops.shares_layers`), so calls
    of several layers are of one sort.
    """

    options: Mapping[str, Any]
    same_layers: bool
    calls: list[RecordedCall] = dataclasses.field(default_factory=list)
    implementations: dict[str, Any] = dataclasses.field(default_factory=dict)
    _traced: list[tuple[str, _Form, list[Any]]] = dataclasses.field(default_factory=list)

    def wrap(self, op: str, implementation: Any) -> Callable[..., Any]:
        """Return what records the calls of an implementation."""
        self.implementations[op] = implementation
        return functools.partial(self._call, op)

    def _call(self, op: str, *arguments: Any, **keywords: Any) -> Any:
        given = keywords
        if self.same_layers and LAYER in keywords.get("inputs", ()):
            given = {**keywords, "inputs": {**keywords["inputs"], LAYER: 0}}
        leaves, tree = jax.tree.flatten((arguments, given))
        form = _Form.of(leaves, tree)
        arrays = [jnp.asarray(x) for x, a in zip(leaves, form.is_array, strict=True) if a]
        self._traced.append((op, form, arrays))
        return self.implementations[op](*arguments, **keywords)

    def run(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Compile and run a function of arrays that calls ops, and keep their calls with the arrays
        that they got.
        """

        def traced(*arguments: Any) -> tuple[Any, list[list[Any]]]:
            self._traced.clear()
            result = function(*arguments)
            return result, [arrays for _, _, arrays in self._traced]

        _, found = jax.jit(traced, compiler_options=dict(self.options))(*arguments)
        self.calls += [
            RecordedCall(op, form, tuple(arrays))
            for (op, form, _), arrays in zip(self._traced, found, strict=True)
        ]
        self._traced.clear()

    def sorts(self) -> list[list[RecordedCall]]:
        """Return the calls of each op and form, in the order of the first of each."""
        found: dict[tuple[str, _Form], list[RecordedCall]] = {}
        for call in self.calls:
            found.setdefault((call.op, call.form), []).append(call)
        return list(found.values())

    def seconds_alone(self, calls: Sequence[RecordedCall], rounds: int, step_bytes: float) -> float:
        """Return the seconds per call of calls of one sort: the best of `rounds` samples of a
        program that makes the calls one after the other, each with its own arrays. A cache is
        updated in place, as in a step.

        Copies of the arrays, together about as large as the `step_bytes` of a whole step, take
        turns, so that the processor's caches help the calls as little as they do in a step.
        """
        timed = calls[:MAX_TIMED_CALLS]
        form, implementation = timed[0].form, self.implementations[timed[0].op]
        written = written_arrays(implementation, timed[0])
        states = [tuple(jnp.copy(call.arrays[i]) for i in written) for call in timed]
        others = [tuple(x for i, x in enumerate(call.arrays) if i not in written) for call in timed]
        function = functools.partial(_chained, implementation, form, written)
        jitted = jax.jit(function, donate_argnums=0, compiler_options=dict(self.options))
        program = jitted.lower(states, others).compile()
        num_bytes = sum(x.nbytes for x in jax.tree.leaves((states, others)))
        sets = [(states, others)]
        while len(sets) < min(MAX_SETS, math.ceil(step_bytes / max(1, num_bytes))):
            sets.append(jax.tree.map(jnp.copy, sets[0]))

        def run() -> Any:
            given, rest = sets.pop(0)
            after, results = program(given, rest)
            sets.append((after, rest))
            return after, results

        jax.block_until_ready([run() for _ in range(len(sets))])  # touches the memory
        num_runs, best_s = len(sets), math.inf
        for _ in range(rounds + 1):  # the first finds how many runs make a sample
            started_s = time.perf_counter()
            jax.block_until_ready([run() for _ in range(num_runs)][-1])
            best_s = min(best_s, (time.perf_counter() - started_s) / num_runs)
            num_runs = max(len(sets), math.ceil(SAMPLE_S / best_s))
        return best_s / len(timed)


def _called(implementation: Any, form: _Form, arrays: Sequence[Any]) -> Any:
    arguments, keywords = form.arguments(arrays)
    return implementation(*arguments, **keywords)


def written_arrays(implementation: Any, call: RecordedCall) -> dict[int, int]:
    """Return the arrays of a call that its op updates: index among the call's arrays -> index among
    the leaves of the result. An op updates a mapping of arrays (a layer's cache) if its result is,
    or has as an element, a mapping of the same names and shapes.
    """
    places = iter(range(len(call.arrays)))
    numbered = call.form.arguments([next(places) for _ in call.arrays])[0]
    result = jax.eval_shape(functools.partial(_called, implementation, call.form), call.arrays)
    leaves, tree = jax.tree.flatten(result)
    outs = jax.tree.unflatten(tree, range(len(leaves)))
    returned = [out for out in (outs if isinstance(outs, tuple) else (outs,)) if _is_cache(out)]

    def shapes(arrays: Sequence[Any], cache: Mapping[str, int]) -> dict[str, Any]:
        return {name: (arrays[i].shape, arrays[i].dtype) for name, i in cache.items()}

    found: dict[int, int] = {}
    for given in filter(_is_cache, numbered):
        for out in returned:
            if shapes(call.arrays, given) == shapes(leaves, out):
                found |= {given[name]: out[name] for name in out}
    return found


def _is_cache(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(one, int) for one in value.values())


def _chained(
    implementation: Any,
    form: _Form,
    written: Mapping[int, int],
    states: Sequence[tuple[jax.Array, ...]],
    others: Sequence[tuple[jax.Array, ...]],
) -> Any:
    """Make calls one after the other: a small array of each gets a number of the call before. All
    results are returned, so that none is computed in part.
    """
    before = jnp.float32(0)
    after, results = [], []
    for state, other in zip(states, others, strict=True):
        given, rest = dict(zip(written, state, strict=True)), iter(_depending(other, before))
        arrays = [given[i] if i in given else next(rest) for i in range(len(form.arrays))]
        leaves = jax.tree.leaves(_called(implementation, form, arrays))
        before = leaves[0].reshape(-1)[0].astype(jnp.float32)
        after.append(tuple(leaves[i] for i in written.values()))
        results.append([x for i, x in enumerate(leaves) if i not in written.values()])
    return after, results


def _depending(arrays: Sequence[jax.Array], before: jax.Array) -> list[jax.Array]:
    """Return the arrays, with 0 added to the smallest one in a way that waits for `before`."""
    numbers = [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.number) and x.size]
    found = list(arrays)
    if numbers:
        at = min(numbers, key=lambda i: found[i].size)
        zero = jnp.where(jnp.isfinite(before), before * 0, 0)
        found[at] = found[at] + zero.astype(found[at].dtype)
    return found
