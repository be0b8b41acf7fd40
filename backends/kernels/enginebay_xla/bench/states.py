"""The op short_conv as a benchmark."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.ops.batches import derive_batch
from enginebay.ops.short_conv import SHORT_CONV as SHORT_CONV_OP
from enginebay.ops.spec import Bucket
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
from enginebay_xla.bench.plain import MAX_ROWS, OF_ROWS
from enginebay_xla.short_conv import INPUTS

TAPS, BEFORE = 3, 64
"""Taps of LFM2's convolutions, and the tokens before the step of a row that goes on."""


def short_conv_problem(shape: Shape, setting: BenchSetting) -> Problem:
    """The step's tokens, as wide as the model's hidden states, with a place of each row in a pool
    of five times as many. Rows of a prefill begin in it; a mixed step has one chunk behind rows of
    one token.
    """
    rows, tokens, width = shape.batch, shape.num_tokens(), shape.layer.hidden
    new = np.full(rows, tokens // rows if shape.mode == "prefill" else 1, np.int32)
    new[-1] += tokens - new.sum()
    total = new + (0 if shape.mode == "prefill" else BEFORE)
    bucket = Bucket(tokens, rows, 1, int(new.max()), int(total.max()), shape.mode)
    sizes = ((1 + 5 * rows, TAPS - 1, width), (tokens, width), (width, TAPS))
    state, x, weight = (jax.ShapeDtypeStruct(size, jnp.dtype(setting.dtype)) for size in sizes)
    places = np.random.default_rng(3).permutation(sizes[0][0])[:rows, None]

    def make(poison: float) -> Inputs:
        held, *arrays = (
            jnp.asarray(noise(size, setting.dtype, setting.seed, i)) for i, size in enumerate(sizes)
        )
        unused = np.setdiff1d(np.arange(sizes[0][0]), places)
        step = (new, total, places.astype(np.int32))
        return Inputs({INPUTS: held.at[unused].set(poison)}, (*arrays, *map(jnp.asarray, step)))

    def bind(impl: Any, _: Any) -> StepFunction:
        def step(state: Any, x: Any, weight: Any, new: Any, total: Any, table: Any) -> Any:
            batch = derive_batch(new, total, table, bucket.max_kv_len, bucket)
            return impl(x, weight, None, state, batch)

        return step

    def check(inputs: Inputs, out: Any, after: Any) -> Parity:
        x, weight = (np.asarray(array).astype(np.float64) for array in inputs.arrays[:2])
        held, ends = np.asarray(inputs.state[INPUTS]).astype(np.float64), np.cumsum(new)
        some = spread(tokens, MAX_ROWS)
        error, allowed = [], []
        for token in some:
            row = int(np.searchsorted(ends, token, side="right"))
            before = held[places[row, 0]] * (total[row] > new[row])
            seen = np.concatenate([before, x[ends[row] - new[row] : token + 1]])[-TAPS:].T
            exact, size = (seen * weight).sum(axis=1), np.abs(seen * weight).sum(axis=1)
            error.append(np.abs(np.asarray(out[token]).astype(np.float64) - exact))
            allowed.append(
                oracle.EPS[setting.dtype] * np.abs(exact) + 4 * oracle.EPS["float32"] * size
            )
        return worst(np.array(error), np.array(allowed), compared(some.size, tokens, "rows"))

    return Problem(
        name=shape.name,
        cost=cost_of(SHORT_CONV_OP, x, weight, None, {INPUTS: state}, batch_of(bucket)),
        num_bytes=sum(math.prod(size) for size in sizes) * x.dtype.itemsize,
        make=make,
        bind=bind,
        check=check,
    )


SHORT_CONV = OpBench(OF_ROWS, lambda *at: [short_conv_problem(*at)])
