"""The op ssd_scan as a benchmark."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.ops.batches import derive_batch
from enginebay.ops.spec import Bucket
from enginebay.ops.ssd_scan import SSD_SCAN as SSD_SCAN_OP
from enginebay_bench.problem import (
    BenchSetting,
    Inputs,
    OpBench,
    Parity,
    Problem,
    StepFunction,
    compared,
    cost_of,
    noise,
    spread,
    worst,
)
from enginebay_bench.shapes import Shape
from enginebay_testing import oracle
from enginebay_testing.compile_suite import batch_of
from enginebay_xla.bench.plain import OF_ROWS
from enginebay_xla.bench.states import BEFORE
from enginebay_xla.kit.scans import ROUNDINGS
from enginebay_xla.ssd_scan import SCAN

HEAD_DIM, STATE_SIZE = 64, 128
"""Sizes of the models with Mamba-2 that are published, whose heads mostly share one group."""
MAX_HEADS = 2
"""Heads of each row whose outputs are checked."""


def ssd_scan_problem(shape: Shape, setting: BenchSetting) -> Problem:
    """The step's tokens, with inner features twice as many as the model's hidden ones, and a place
    of each row in a pool of five times as many. Rows of a prefill begin in it; a mixed step has one
    chunk behind rows of one token.
    """
    rows, tokens, heads = (
        shape.batch,
        shape.num_tokens(),
        max(1, 2 * shape.layer.hidden // HEAD_DIM),
    )
    new = np.full(rows, tokens // rows if shape.mode == "prefill" else 1, np.int32)
    new[-1] += tokens - new.sum()
    total = new + (0 if shape.mode == "prefill" else BEFORE)
    bucket = Bucket(tokens, rows, 1, int(new.max()), int(total.max()), shape.mode)
    dtype = setting.dtype
    shapes: tuple[tuple[tuple[int, ...], str], ...] = (
        ((tokens, heads, HEAD_DIM), dtype),
        ((tokens, heads), "float32"),
        ((heads,), "float32"),
        ((tokens, 1, STATE_SIZE), dtype),
        ((tokens, 1, STATE_SIZE), dtype),
        ((heads,), dtype),
        ((1 + 5 * rows, heads, HEAD_DIM, STATE_SIZE), "float32"),
    )
    *structs, state = (jax.ShapeDtypeStruct(size, jnp.dtype(kind)) for size, kind in shapes)
    places = np.random.default_rng(3).permutation(state.shape[0])[:rows, None]

    def make(poison: float) -> Inputs:
        *arrays, held = (
            jnp.asarray(noise(size, kind, setting.seed, i)) for i, (size, kind) in enumerate(shapes)
        )
        arrays[1], arrays[2] = jnp.exp(arrays[1] - 3), -jnp.exp(arrays[2])
        unused = np.setdiff1d(np.arange(state.shape[0]), places)
        step = (new, total, places.astype(np.int32))
        return Inputs({SCAN: held.at[unused].set(poison)}, (*arrays, *map(jnp.asarray, step)))

    def bind(impl: Any, _: Any) -> StepFunction:
        def step(state: Any, *inputs: Any) -> Any:
            *arrays, new, total, table = inputs
            batch = derive_batch(new, total, table, bucket.max_kv_len, bucket)
            return impl(*arrays, state, batch)

        return step

    def check(inputs: Inputs, out: Any, after: Any) -> Parity:
        arrays = [np.asarray(array).astype(np.float64) for array in inputs.arrays[:6]]
        held, ends = np.asarray(inputs.state[SCAN]), np.cumsum(new)
        some, error, allowed = spread(rows, 8), [], []
        for row in some:
            span = slice(int(ends[row] - new[row]), int(ends[row]))
            before = held[places[row, 0]] * (total[row] > new[row])
            for head in spread(heads, MAX_HEADS):
                exact, slack = _outputs(arrays, before[head].astype(np.float64), span, int(head))
                own = np.asarray(out[span, head]).astype(np.float64)
                error.append(np.abs(own - exact))
                allowed.append(oracle.EPS[dtype] * np.abs(exact) + slack)
        counted = compared(some.size, rows, "rows")
        return worst(np.concatenate(error), np.concatenate(allowed), counted)

    return Problem(
        name=shape.name,
        cost=cost_of(SSD_SCAN_OP, *structs, {SCAN: state}, batch_of(bucket)),
        num_bytes=sum(math.prod(size) * jnp.dtype(kind).itemsize for size, kind in shapes),
        make=make,
        bind=bind,
        check=check,
    )


def _outputs(
    arrays: list[np.ndarray], state: np.ndarray, span: slice, head: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the outputs [tokens, head_dim] of one head of a row, and what roundings may add."""
    x, dt, decay, b, c, skip = arrays
    out, slack = [], []
    size, loose, eps = np.abs(state), np.zeros(state.shape), ROUNDINGS * oracle.EPS["float32"]
    for token in range(span.start, span.stop):
        fade = np.exp(dt[token, head] * decay[head])
        added = dt[token, head] * x[token, head][:, None] * b[token, 0]
        state, size = fade * state + added, fade * size + np.abs(added)
        loose = fade * loose + eps * size
        direct = skip[head] * x[token, head]
        out.append(state @ c[token, 0] + direct)
        slack.append((loose + eps * size) @ np.abs(c[token, 0]) + eps * np.abs(direct))
    return np.array(out), np.array(slack)


SSD_SCAN = OpBench(OF_ROWS, lambda *at: [ssd_scan_problem(*at)])
