"""Times calls of ops that a model made, each sort in a program of its own."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from enginebay_runtime.recorded_calls import CallForm, CallRecorder, RecordedCall

MAX_TIMED_CALLS = 32
"""Max calls in the program that times calls of one sort."""

MAX_SETS = 16
"""Max copies of the arrays of a sort of calls."""

SAMPLE_S = 0.002


def seconds_alone(
    recorder: CallRecorder, calls: Sequence[RecordedCall], rounds: int, step_bytes: float
) -> float:
    """Return the seconds per call of calls of one sort: the best of `rounds` samples of a
    program that makes the calls one after the other, each with its own arrays. A cache is
    updated in place, as in a step.

    Copies of the arrays, together about as large as the `step_bytes` of a whole step, take
    turns, so that the processor's caches help the calls as little as they do in a step.
    """
    timed = calls[:MAX_TIMED_CALLS]
    form, implementation = timed[0].form, recorder.implementations[timed[0].op]
    written = written_arrays(implementation, timed[0])
    states = [tuple(jnp.copy(call.arrays[i]) for i in written) for call in timed]
    others = [tuple(x for i, x in enumerate(call.arrays) if i not in written) for call in timed]
    function = functools.partial(_chained, implementation, form, written)
    jitted = jax.jit(function, donate_argnums=0, compiler_options=dict(recorder.options))
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


def _called(implementation: Any, form: CallForm, arrays: Sequence[Any]) -> Any:
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
    form: CallForm,
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
