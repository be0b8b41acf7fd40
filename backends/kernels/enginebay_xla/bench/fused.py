"""The fused ops and the draw of a token as benchmarks."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.ops.norm import ADD_RMS_NORM as ADD_RMS_NORM_OP
from enginebay.ops.rope import ROPE_KV_WRITE as ROPE_KV_WRITE_OP
from enginebay.ops.rotary import RopeSpec
from enginebay.ops.sample import SAMPLE as SAMPLE_OP
from enginebay_bench.attention import same_bits
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
from enginebay_bench.shapes import BATCHES, Axes, Shape
from enginebay_testing import oracle
from enginebay_testing.sampling_oracle import OracleParams, kept_tokens
from enginebay_xla.bench.plain import EPS_OF_NORM, MAX_ROWS, OF_ROWS, WRITES, kv_write_problem
from enginebay_xla.kit.sample import gumbel_noise

TOP_K, TOP_P = 50, 0.95
"""What the rows of the sample benchmark ask for."""

SLACK = 1e-6
"""Of the mass at top_p's border, which the op's contract allows."""


def add_rms_norm_problem(shape: Shape, setting: BenchSetting) -> Problem:
    """The sum of a branch with the residual, and its norm."""
    rows, features = shape.num_tokens(), shape.layer.hidden
    sizes = ((rows, features), (rows, features), (features,))
    shapes = [jax.ShapeDtypeStruct(size, jnp.dtype(setting.dtype)) for size in sizes]
    cost = cost_of(ADD_RMS_NORM_OP, *shapes, eps=EPS_OF_NORM)

    def make(_: float) -> Inputs:
        arrays = (noise(size, setting.dtype, setting.seed, i) for i, size in enumerate(sizes))
        return Inputs((), tuple(map(jnp.asarray, arrays)))

    def bind(impl: Any, _: Any) -> StepFunction:
        return lambda state, x, residual, weight: (
            impl(x, residual, weight, eps=EPS_OF_NORM),
            state,
        )

    def check(inputs: Inputs, out: Any, _: Any) -> Parity:
        x, residual, weight = map(np.asarray, inputs.arrays)
        normed, total = map(np.asarray, out)
        some = spread(rows, MAX_ROWS)
        if not np.array_equal(
            total[some], np.asarray(jnp.asarray(x[some]) + jnp.asarray(residual[some]))
        ):
            return Parity(float("nan"), float("inf"), "the dtype's own sum, bit by bit")
        exact = oracle.rms_norm(total[some], weight, eps=EPS_OF_NORM)
        allowed = 2 * max(oracle.EPS[setting.dtype], 4e-7) * np.abs(exact)
        error = np.abs(normed[some].astype(np.float64) - exact)
        return worst(error, allowed, compared(some.size, rows, "rows"))

    return Problem(shape.name, cost, int(cost.bytes_read), make, bind, check)


def rope_kv_write_problem(shape: Shape, setting: BenchSetting) -> Problem:
    """Queries and keys are rotated, keys and values put into a paged cache, which is donated."""
    layer, rows = shape.layer, shape.num_tokens()
    spec = RopeSpec(layer.rope_theta, layer.head_dim)
    written = kv_write_problem(shape, setting)
    size = (rows, layer.num_q_heads, layer.head_dim)

    def make(poison: float) -> Inputs:
        before = written.make(poison)
        slots, k, v = before.arrays
        q = jnp.asarray(noise(size, setting.dtype, setting.seed, 4))
        return Inputs(before.state, (q, k, v, jnp.arange(rows, dtype=jnp.int32), slots))

    pages = -(-max(shape.batch * shape.context, rows) // setting.page_size)
    layout = setting.layout_type(
        pages, setting.page_size, layer.num_kv_heads, layer.head_dim, setting.dtype
    )

    dtype, places = jnp.dtype(setting.dtype), jax.ShapeDtypeStruct((rows,), jnp.int32)
    q, new = (
        jax.ShapeDtypeStruct((rows, heads, layer.head_dim), dtype)
        for heads in (layer.num_q_heads, layer.num_kv_heads)
    )
    of_call = (q, new, new, layout.shapes(), places, places)

    def bind(impl: Any, _: Any) -> StepFunction:
        return lambda cache, q, k, v, positions, slots: impl(
            q, k, v, cache, positions, slots, spec=spec, layout=layout
        )

    def check(inputs: Inputs, out: Any, after: Any) -> Parity:
        q, k, v, positions, slots = inputs.arrays
        keys, values = layout.read_tokens(after, slots)
        if not bool(jax.jit(same_bits)(v, values)):
            return Parity(float("nan"), float("inf"), "the values that were written, bit by bit")
        some, at = spread(rows, MAX_ROWS), np.asarray(positions)
        unit = oracle.EPS["float32"] * (2.0 + at[some]) + oracle.EPS[setting.dtype]
        found = [
            worst(
                np.abs(
                    np.asarray(got)[some].astype(np.float64)
                    - oracle.rope(np.asarray(x)[some], at[some], spec)
                ),
                (unit * np.abs(np.asarray(x).astype(np.float64)).max() * 2)[:, None, None],
                compared(some.size, rows, "rows of queries and keys"),
            )
            for got, x in ((out, q), (keys, k))
        ]
        return max(found, key=lambda parity: np.nan_to_num(parity.share, nan=np.inf))

    return dataclasses.replace(
        written,
        cost=cost_of(ROPE_KV_WRITE_OP, *of_call, spec=spec, layout=layout),
        num_bytes=written.num_bytes + math.prod(size) * dtype.itemsize,
        make=make,
        bind=bind,
        check=check,
    )


def sample_problem(shape: Shape, setting: BenchSetting) -> Problem:
    """A draw for each row from the TOP_K best tokens of the model's vocabulary, and of these the
    share TOP_P.
    """
    rows, vocab = shape.batch, shape.layer.vocab
    z = jax.ShapeDtypeStruct((rows, vocab), jnp.float32)
    cost = cost_of(SAMPLE_OP, z, None, top_k=TOP_K, top_p=TOP_P, min_p=0.0)

    def make(_: float) -> Inputs:
        logits = 2.0 * noise((rows, vocab), "float32", setting.seed, 5)
        seeds = np.random.default_rng(6).integers(0, 2**32, (rows, 2), dtype=np.uint32)
        return Inputs(
            (), (jnp.asarray(logits - logits.max(axis=1, keepdims=True)), jnp.asarray(seeds))
        )

    def bind(impl: Any, _: Any) -> StepFunction:
        asked = {
            "top_k": jnp.full((rows,), TOP_K, jnp.int32),
            "top_p": jnp.full((rows,), TOP_P, jnp.float32),
            "min_p": jnp.zeros((rows,), jnp.float32),
        }
        return lambda state, z, seeds: (impl(z, seeds, **asked), state)

    def check(inputs: Inputs, out: Any, _: Any) -> Parity:
        z, seeds = map(np.asarray, inputs.arrays)
        tokens, some = np.asarray(out), spread(rows, MAX_ROWS)
        params = OracleParams(top_k=TOP_K, top_p=TOP_P)
        scores = z[some].astype(np.float64) + gumbel_noise(seeds[some], np.arange(vocab))
        best = [
            np.where(kept_tokens(row, params, -SLACK), score, -np.inf).max()
            for row, score in zip(z[some], scores, strict=True)
        ]
        behind = np.maximum(np.asarray(best) - scores[np.arange(some.size), tokens[some]], 0.0)
        may = [
            kept_tokens(row, params, SLACK)[token]
            for row, token in zip(z[some], tokens[some], strict=True)
        ]
        behind = np.where(may, behind, np.nan)
        return worst(behind, 1e-5 * (1.0 + np.abs(best)), compared(some.size, rows, "rows"))

    return Problem(shape.name, cost, int(cost.bytes_read), make, bind, check)


ADD_RMS_NORM = OpBench(OF_ROWS, lambda *at: [add_rms_norm_problem(*at)])
ROPE_KV_WRITE = OpBench(WRITES, lambda *at: [rope_kv_write_problem(*at)])
SAMPLE = OpBench(Axes(BATCHES, dict.fromkeys(BATCHES, (0,))), lambda *at: [sample_problem(*at)])
