"""Checks of linear, rms_norm, add_rms_norm, rope and embedding.

A case has one value for each axis that the op's kit varies, such as dtype.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, cast

import jax.numpy as jnp
import numpy as np

from enginebay_numerics.rotary import RopeSpec
from enginebay_testing import oracle
from enginebay_testing.exact import hold
from enginebay_testing.kernels import ROPE_SPECS
from enginebay_testing.op_kit import PlainCase
from enginebay_testing.verdicts import expect

EPS_F32 = oracle.EPS["float32"]


def same_type(got: np.ndarray, shape: tuple[int, ...], dtype: Any) -> None:
    """Raise AssertionError when a result has another shape or dtype."""
    expect(
        (got.shape, got.dtype) == (shape, jnp.dtype(dtype)),
        f"{got.shape} {got.dtype}, expected {shape} {dtype}",
    )


def spread_entries(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> np.ndarray:
    """Return f64 entries for a value of the axis `data` of linear and grouped_linear."""
    x = rng.normal(size=shape)
    rows = x.reshape(shape[0], math.prod(shape[1:]))
    if kind == "one_sign":
        rows[:] = np.abs(rows)
    elif kind == "outlier" and rows.size:
        rows[np.arange(shape[0]), rng.integers(0, rows.shape[1], shape[0])] = 300.0
    elif kind == "rows_apart":
        rows *= np.logspace(-3, 2, shape[0])[:, None]
    elif kind == "nan_row" and shape[0] > 1:
        rows[-1] = np.nan
    return x


def _split(size: int, num_dims: int) -> tuple[int, ...]:
    """Return `num_dims` dimensions whose product is about `size`."""
    return (size,) if num_dims == 1 else (max(1, size // 4), 4)


def check_linear_case(kernel: Any, case: PlainCase) -> None:
    """Check a product: an f32 sum, then a bias, then one rounding."""
    row, rng = case.row, case.rng()
    in_dims, out_dims = (_split(case.int(f"{n}puts"), case.int(f"{n}_dims")) for n in ("in", "out"))
    x = spread_entries(rng, (case.int("rows"), *in_dims), str(row["data"])).astype(case.dtype)
    weight = spread_entries(
        rng, (*out_dims, *in_dims), "one_sign" if row["data"] == "one_sign" else "plain"
    )
    weight = weight.astype(case.dtype)
    bias = None if row["bias"] == "none" else rng.normal(size=out_dims).astype(case.dtype)
    finite = np.isfinite(x.astype(np.float64)).all(axis=tuple(range(1, x.ndim)))
    if row["bias"] == "cancelling" and x.shape[0]:
        bias = -oracle.linear(x[:1], weight)[0].astype(case.dtype)
    out_dtype = row["out_dtype"]
    call = functools.partial(case.configured(kernel), out_dtype=out_dtype)
    got = case.run(call, x, weight, bias)
    expected = oracle.linear(x, weight, bias)
    wanted = str(out_dtype or row["dtype"])
    same_type(got, expected.shape, wanted)
    sums = oracle.linear(np.abs(x), np.abs(weight), None if bias is None else np.abs(bias))
    # The rounding errors of an f32 sum are a random walk: they grow with the root of their number.
    sums = sums * max(4.0, np.sqrt(math.prod(in_dims))) * EPS_F32
    smallest = float(jnp.finfo(wanted).smallest_subnormal)
    allowed = oracle.EPS[wanted] * np.abs(expected) + sums + smallest
    error = np.abs(got.astype(np.float64) - expected)
    hold(error[finite], allowed[finite], "linear", rms=None if wanted == "float32" else 0.36)


NORM_SCALES = {
    "plain": 1.0,
    "tiny": 1e-3,
    "large": 300.0,
    "zero": 1.0,
    "outlier": 1.0,
    "nan_row": 1.0,
}


def _norm_input(case: PlainCase, shape: tuple[int, ...]) -> np.ndarray:
    rng, size = case.rng(), str(case.row["size"])
    x = rng.normal(size=shape) * NORM_SCALES[size]
    if size == "zero":
        x[::2] = 0.0
    elif size == "outlier":
        x[..., rng.integers(0, shape[-1])] = 200.0
    elif size == "nan_row" and shape[0] > 1:
        x[-1] = np.nan
    return x.astype(case.dtype)


def _norm_weight(case: PlainCase, features: int) -> np.ndarray:
    weight = np.random.default_rng([case.seed, 8]).normal(size=features)
    if case.row["weight"] == "plain":
        weight = np.abs(weight) + 0.5
    else:
        weight[::3] = 0.0
    return weight.astype(case.dtype)


def _norm_shape(case: PlainCase) -> tuple[int, ...]:
    rows, features = case.int("rows"), case.int("features")
    return (rows, features) if case.int("dims") == 2 else (rows, 3, features)


def _hold_norm(
    got: np.ndarray, x: np.ndarray, weight: np.ndarray, case: PlainCase, what: str
) -> None:
    same_type(got, x.shape, x.dtype)
    real = np.isfinite(x.astype(np.float64)).all(axis=-1)
    expected = oracle.rms_norm(x[real], weight, eps=float(cast("float", case.row["eps"])))
    # A compiler may keep a fused sum unrounded, so that the input of the norm differs by a rounding
    # too.
    allowed = 2 * max(case.eps, 4e-7) * np.abs(expected) + float(
        jnp.finfo(case.dtype).smallest_subnormal
    )
    error = np.abs(got[real].astype(np.float64) - expected)
    hold(error, allowed, what, rms=None if str(case.dtype) == "float32" else 0.4)


def check_rms_norm_case(kernel: Any, case: PlainCase) -> None:
    """Check rows within two roundings of the dtype; a row of NaN must not change others."""
    x = _norm_input(case, _norm_shape(case))
    weight = _norm_weight(case, x.shape[-1])
    got = case.run(functools.partial(kernel, eps=case.row["eps"]), x, weight)
    _hold_norm(got, x, weight, case, "rms_norm")


def check_add_rms_norm_case(kernel: Any, case: PlainCase) -> None:
    """Check that the sum is that of the dtype bit by bit, and its norm within two roundings."""
    x = _norm_input(case, _norm_shape(case))
    residual = (
        np.random.default_rng([case.seed, 9]).normal(size=x.shape)
        * NORM_SCALES[str(case.row["size"])]
    ).astype(case.dtype)
    if case.row["size"] == "zero":
        residual[::2] = 0
    weight = _norm_weight(case, x.shape[-1])
    normed, total = case.run(functools.partial(kernel, eps=case.row["eps"]), x, residual, weight)
    same_type(total, x.shape, x.dtype)
    real = np.isfinite(x.astype(np.float64))
    expect((total == x + residual)[real].all(), "the sum differs from that of its dtype")
    _hold_norm(normed, total, weight, case, "the norm of the sum")


def rope_spec(case: PlainCase) -> RopeSpec:
    """Return the rule of frequencies of a case, over all features or the first half."""
    head_dim = case.int("head_dim")
    rotary = head_dim if case.row["rotary"] == "whole" else head_dim // 2
    return dataclasses.replace(ROPE_SPECS[str(case.row["rule"])], rotary_dim=rotary)


def rope_positions(case: PlainCase, tokens: int) -> np.ndarray:
    """Return positions int32 [tokens]."""
    rng = case.rng()
    kind = case.row["positions"]
    if kind == "far":
        return rng.integers(30_000, 130_000, tokens).astype(np.int32)
    if kind == "descending":
        return (37 * np.arange(tokens)[::-1]).astype(np.int32)
    if kind == "equal":
        return np.full(tokens, 513, np.int32)
    return np.concatenate([[0, 1, 7, 100, 1000, 4095], rng.integers(0, 9000, tokens)])[
        :tokens
    ].astype(np.int32)


def hold_turned(
    got: np.ndarray,
    x: np.ndarray,
    positions: np.ndarray,
    spec: RopeSpec,
    what: str,
    tolerance: float = 0.0,
) -> None:
    """Raise AssertionError unless the features are rotated within rounding.

    The bound includes the rounding of angles. Features after rotary_dim must be unchanged.
    `tolerance` is that of the layout from which `got` was read.
    """
    same_type(got, x.shape, x.dtype)
    if not x.size:
        return
    # A rotation can move both parts of a pair into one feature.
    lost = 2 * tolerance * np.abs(x.astype(np.float64)).max(axis=-1, keepdims=True)
    kept = (each[..., spec.rotary_dim :].astype(np.float64) for each in (got, x))
    is_same = (np.abs(np.subtract(*kept)) <= lost).all()
    expect(is_same, f"{what}: features after rotary_dim have changed")
    factor = oracle.rope_frequencies(spec)[1]
    wide = np.abs(x.astype(np.float64))
    half = spec.rotary_dim // 2
    pairs = wide[..., :half] + wide[..., half : spec.rotary_dim]
    # An f32 angle has its own rounding error and that of its frequency.
    angle = EPS_F32 * (2.0 + positions)[:, None, None]
    expected = oracle.rope(x, positions, spec)[..., : spec.rotary_dim]
    allowed = np.concatenate([pairs, pairs], axis=-1) * factor * (2 * angle + 4 * EPS_F32)
    allowed = (
        allowed
        + oracle.EPS[str(x.dtype)] * np.abs(expected)
        + float(jnp.finfo(x.dtype).smallest_subnormal)
        + lost
    )
    error = np.abs(got[..., : spec.rotary_dim].astype(np.float64) - expected)
    hold(error, allowed, what, rms=None if str(x.dtype) == "float32" or tolerance else 0.36)


def check_rope_case(kernel: Any, case: PlainCase) -> None:
    """Check rotated features within one rounding of f32 arithmetic."""
    spec, tokens = rope_spec(case), case.int("tokens")
    positions = rope_positions(case, tokens)
    x = case.rng().normal(size=(tokens, case.int("heads"), case.int("head_dim"))).astype(case.dtype)
    got = case.run(functools.partial(kernel, spec=spec), x, positions)
    hold_turned(got, x, positions, spec, "rope")


def check_embedding_case(kernel: Any, case: PlainCase) -> None:
    """Check that each row equals the table's bit by bit; also NaN, infinities, negative zeros."""
    vocab, tokens = case.int("vocab"), case.int("tokens")
    rng = case.rng()
    table = rng.normal(size=(vocab, case.int("features"))).astype(case.dtype)
    table[0, 0], table[-1, -1] = -0.0, np.inf
    table[vocab // 2, 0] = np.nan
    kinds = {
        "mixed": rng.integers(0, vocab, tokens),
        "last": np.full(tokens, vocab - 1),
        "equal": np.full(tokens, vocab // 2),
        "all": np.arange(tokens) % vocab,
    }
    ids = kinds[str(case.row["ids"])].astype(np.int32)
    got = case.run(kernel, table, ids)
    same_type(got, (tokens, table.shape[1]), table.dtype)
    expect(got.tobytes() == table[ids].tobytes(), "rows differ from the table's")
