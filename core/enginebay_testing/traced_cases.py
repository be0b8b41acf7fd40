"""Cases of a captured run: a kernel is checked on the calls that the steps of a trace made, with
their shapes, rows and page tables.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import unittest
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.compose.ops import ATTENTION
from enginebay.contracts.cache import KVLayout
from enginebay.errors import InputError
from enginebay.ops.bound import AttentionImpl
from enginebay.ops.caps import Env
from enginebay.ops.op import Op
from enginebay.ops.spec import FLOAT_DTYPES, AttnBatch
from enginebay.weights import QuantizedArray
from enginebay_runtime.call_trace import (
    CallTrace,
    TracedArray,
    TracedAttention,
    TracedCall,
    TracedStep,
)
from enginebay_runtime.recorded_calls import CallForm
from enginebay_testing.attention_cases import TracedCase
from enginebay_testing.attention_runs import AttentionRuns, check_case
from enginebay_testing.case_runs import CaseRuns
from enginebay_testing.exact import OpCall, errors, hold
from enginebay_testing.op_kit import CaseBudget, OpCase
from enginebay_testing.quantized import FORMS, random_weight

REPEATS = 3

SHIPPED = Path(__file__).with_name("traces")
"""Traces of real runs, by name."""

SUFFIX = ".trace"


def find_trace(text: str) -> CallTrace:
    """Return the trace of a file, or one of SHIPPED by its name. InputError for neither."""
    path = Path(text)
    if path.exists():
        return CallTrace.read(path)
    names = sorted(path.name.removesuffix(SUFFIX) for path in SHIPPED.glob(f"*{SUFFIX}"))
    if text not in names:
        raise InputError(
            f"--trace {text}",
            f"a file that --capture wrote, or one of {', '.join(names)}",
            "Pass one of these.",
        )
    return CallTrace.read(SHIPPED / f"{text}{SUFFIX}")


@dataclasses.dataclass(frozen=True)
class TracedShape:
    """One call of an op in a trace, with a name."""

    name: str
    step: TracedStep
    call: TracedAttention | TracedCall

    @property
    def dtype(self) -> str:
        """Return the dtype of the activations: that of queries, or of the first floats."""
        if isinstance(self.call, TracedAttention):
            return self.call.spec.q_dtype
        leaves = jax.tree.leaves(self.call.arguments, is_leaf=_is_weight)
        dtypes = (x.dtype for x in leaves if is_traced(x))
        return next((dtype for dtype in dtypes if dtype in FLOAT_DTYPES), "float32")


def traced_shapes(trace: CallTrace, op: str) -> list[TracedShape]:
    """Return the calls of an op that differ, in the order of the steps. Calls with equal arguments
    in several steps are one.
    """
    found: dict[str, TracedShape] = {}
    known: set[Any] = set()
    for step in trace.steps:
        has_rows = bool((step.kv_lens > 0).any())
        attention = step.attention if has_rows else ()
        same = attention if op == ATTENTION else [c for c in step.calls if c.op == op]
        for call in same:
            identity = (step.number, call) if op == ATTENTION else _identity(call)
            if identity in known:
                continue
            known.add(identity)
            what = call.group if isinstance(call, TracedAttention) else _shapes(call.arguments)
            name = f"{step.name}, {what}, {_times(call)}"
            while name in found:
                name += "'"
            found[name] = TracedShape(name, step, call)
    return list(found.values())


def _times(call: TracedAttention | TracedCall) -> str:
    """Return how often a step made a call, and with which kernel, such as "12 calls of native"."""
    return f"{call.num_calls} call{'s' * (call.num_calls != 1)} of {call.kernel}"


def describe_trace(trace: CallTrace) -> str:
    """Return what was captured, on one line."""
    return "trace of " + ", ".join(f"{name} {value}" for name, value in trace.run.items())


def _identity(call: Any) -> Any:
    """Return what tells calls apart: structure and arrays."""
    leaves, tree = jax.tree.flatten((call.arguments, dict(call.keywords)))
    arrays = [
        (x.shape, x.dtype, None if x.values is None else x.values.tobytes())
        if isinstance(x, TracedArray)
        else repr(x)
        for x in leaves
    ]
    return str(tree), *arrays


def _shapes(arguments: Any) -> str:
    """Return the shapes of the first two arrays, such as "4x192 448x192"."""
    leaves = [x for x in jax.tree.leaves(arguments) if is_traced(x)][:2]
    return " ".join("x".join(map(str, one.shape)) or "scalar" for one in leaves)


def attention_case(one: TracedShape) -> TracedCase:
    """Return a call of attention as a case, with the rows that have tokens."""
    step, call = one.step, one.call
    assert isinstance(call, TracedAttention), "a call of attention"
    real = np.flatnonzero(step.kv_lens > 0)
    count = int(real[-1]) + 1 if real.size else 0
    q_lens = np.where(step.kv_lens > 0, step.q_lens, 0)[:count]
    return TracedCase(
        name=one.name,
        mode=step.bucket.mode,
        q_lens=tuple(map(int, q_lens)),
        kv_lens=tuple(map(int, step.kv_lens[:count])),
        spec=call.spec,
        page_size=call.page_size,
        padding_rows=step.bucket.seqs - count,
        rows_are_pages=step.bucket.rows_are_pages,
        shapes=step.bucket,
        num_pages=call.num_pages,
        table=tuple(map(tuple, step.tables[call.group].tolist())),
    )


def op_call(call: TracedCall, seed: int) -> OpCall:
    """Return a call with the numbers that were saved, and with random ones elsewhere."""
    numbers = itertools.count()
    leaves, tree = jax.tree.flatten((call.arguments, dict(call.keywords)), is_leaf=_is_weight)
    filled = [_filled(leaf, seed, next(numbers)) for leaf in leaves]
    arguments, keywords = jax.tree.unflatten(tree, filled)
    return OpCall(arguments, keywords)


def is_traced(value: object) -> bool:
    """Whether a leaf of the arguments of a call stands for an array."""
    return isinstance(value, TracedArray)


def _is_weight(value: object) -> bool:
    return isinstance(value, QuantizedArray)


def _filled(leaf: Any, seed: int, number: int) -> Any:
    if isinstance(leaf, QuantizedArray):
        return _filled_weight(leaf, seed, number)
    if not isinstance(leaf, TracedArray):
        return leaf
    if leaf.values is not None:
        return leaf.values
    rng, dtype = np.random.default_rng([seed, number]), jnp.dtype(leaf.dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        return rng.standard_normal(leaf.shape, np.float32).astype(dtype)
    bounds = jnp.iinfo(dtype)
    return rng.integers(bounds.min, bounds.max, leaf.shape, np.int64, endpoint=True).astype(dtype)


def _filled_weight(weight: QuantizedArray, seed: int, number: int) -> QuantizedArray:
    """Return a quantised weight, whose random numbers are those of its method."""
    parts = weight.values, weight.scales, weight.zero_points
    if weight.method not in FORMS or any(part and part.values is not None for part in parts):
        values, scales, points = (_filled(part, seed, number) for part in parts)
        return QuantizedArray(values, scales, points, weight.method, weight.activations)
    shape, scales = weight.values.shape, weight.scales
    return random_weight(
        weight.method,
        shape,
        len(shape) - (len(scales.shape) - 1),
        scales.shape[-1],
        activations=weight.activations,
        scale_dtype=scales.dtype,
        seed=seed + number,
    )


def traced_cases(
    trace: CallTrace,
    op: Op[Any],
    kernel: Any,
    env: Env,
    layouts: Sequence[type[KVLayout]],
    extent: CaseBudget,
) -> Iterator[OpCase]:
    """Yield a check of a kernel for each different call of its op in a trace. InputError for an op
    that the trace does not have.
    """
    calls = traced_shapes(trace, op.name)
    if not calls:
        has = {ATTENTION, *(call.op for step in trace.steps for call in step.calls)}
        raise InputError(
            f"a trace without calls of {op.name}",
            f"the ops that it has: {', '.join(sorted(has))}",
            "Check a kernel of one of these, or capture more.",
        )
    for one in calls:
        if op.name == ATTENTION:
            run = functools.partial(_check_attention, kernel, one, env, layouts, extent)
        else:
            run = functools.partial(_check_call, op, kernel, one, extent)
        yield OpCase(f"{op.name}[{one.name}]", run)


def _check_attention(
    kernel: AttentionImpl,
    one: TracedShape,
    env: Env,
    layouts: Sequence[type[KVLayout]],
    extent: CaseBudget,
) -> None:
    from enginebay_testing import kernels

    case, layout = attention_case(one), layouts[0]
    reason = kernels.why_not_case(kernel, case, layout, env)
    if reason is not None:
        raise unittest.SkipTest(reason)
    runs = AttentionRuns(
        repeats=1 if extent.interpreted else REPEATS,
        all_scores=not extent.interpreted,
        neighbours=False,
        num_seeds=extent.num_seeds,
        seed=extent.seed,
    )
    check_case(kernel, case, layout, env, runs)


def why_not_repeated(call: TracedCall) -> str | None:
    """Return why a call cannot be judged outside its step, or None."""
    given = [*call.arguments, *call.keywords.values()]
    if any(isinstance(value, AttnBatch) for value in given):
        return "the op updates states of its step's rows, and its results for padding are undefined"
    return None


def _check_call(op: Op[Any], kernel: Any, one: TracedShape, extent: CaseBudget) -> None:
    assert isinstance(one.call, TracedCall), "a call of an op without phases"
    reason = why_not_repeated(one.call)
    if reason is not None:
        raise unittest.SkipTest(reason)
    runs, repeats = CaseRuns(), 1 if extent.interpreted else REPEATS
    for seed in range(extent.seed, extent.seed + extent.num_seeds):
        call = op_call(one.call, seed)
        leaves, tree = jax.tree.flatten((call.arguments, dict(call.keywords)))
        form = CallForm.of(leaves, tree)
        arrays = [x for x, is_array in zip(leaves, form.is_array, strict=True) if is_array]
        runs.begin()
        got = runs(functools.partial(_called, kernel, form), arrays, repeats)
        for error, allowed in errors(op, call, got):
            hold(error, allowed, op.name)


def _called(kernel: Any, form: CallForm, *arrays: Any) -> Any:
    arguments, keywords = form.arguments(arrays)
    return kernel(*arguments, **keywords)
