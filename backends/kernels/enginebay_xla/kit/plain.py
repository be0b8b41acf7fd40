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

from enginebay.contracts.cache import KVLayout
from enginebay.ops.rotary import RopeSpec
from enginebay_testing import oracle
from enginebay_testing.case_runs import other_inputs
from enginebay_testing.exact import hold
from enginebay_testing.kernels import ROPE_SPECS
from enginebay_testing.layouts import allowed_errors
from enginebay_testing.op_kit import PlainCase
from enginebay_testing.verdicts import expect
from enginebay_xla.kit.places import causes_of, hold_copies, hold_rows

EPS_F32 = oracle.EPS["float32"]


def same_type(got: np.ndarray, shape: tuple[int, ...], dtype: Any) -> None:
    """Raise AssertionError when a result has another shape or dtype."""
    expect(
        (got.shape, got.dtype) == (shape, jnp.dtype(dtype)),
        f"{got.shape} {got.dtype}, expected {shape} {dtype}",
    )


ROW_KINDS = 7
"""How many kinds of rows `_special_rows` makes."""


def _special_rows(rows: np.ndarray, turn: int) -> None:
    """Make rows of zeros, with the largest number last, of equal numbers, of the smallest numbers,
    with a large negative number, and of negative zeros; each seventh row stays.
    """
    if not rows.shape[1]:
        return
    kinds = (np.arange(len(rows)) + 4 * turn) % ROW_KINDS
    rows[kinds == 0] = 0.0
    rows[kinds == 1, -1] = 30.0
    rows[kinds == 2] = rows[kinds == 2, :1]
    rows[kinds == 3] *= 1e-6  # subnormal in float16
    rows[kinds == 4, 0] = -100.0
    rows[kinds == 5] = -0.0


def spread_entries(
    rng: np.random.Generator, shape: tuple[int, ...], kind: str, turn: int = 0
) -> np.ndarray:
    """Return f64 entries for a value of the axis `data` of linear and grouped_linear. `turn` moves
    the rows of "special_rows".
    """
    x = rng.normal(size=shape)
    rows = x.reshape(shape[0], math.prod(shape[1:]))
    if kind == "one_sign":
        rows[:] = np.abs(rows)
    elif kind in ("outlier", "largest") and rows.size:
        size = 300.0 if kind == "outlier" else 2000.0
        rows[np.arange(shape[0]), rng.integers(0, rows.shape[1], shape[0])] = size
    elif kind == "rows_apart":
        rows *= np.logspace(-3, 2, shape[0])[:, None]
    elif kind == "special_rows":
        _special_rows(rows, turn)
    elif kind == "nan_row" and shape[0] > 1:
        rows[-1] = np.nan
        if shape[0] > 2:
            rows[shape[0] // 2, -1] = np.inf
    return x


def entries(case: PlainCase, shape: tuple[int, ...], largest: float = 1 / 16) -> np.ndarray:
    """Return x for the axis `data`. The entries of "largest" go up to a share of the largest finite
    number, so that no sum with weights of ordinary size overflows.
    """
    kind = str(case.row["data"])
    x = spread_entries(case.rng(), shape, kind, case.seed)
    if kind == "largest":
        x *= float(jnp.finfo(case.dtype).max) * (largest / 2000.0)
    return x.astype(case.dtype)


def _split(size: int, num_dims: int) -> tuple[int, ...]:
    """Return `num_dims` dimensions whose product is about `size`."""
    return (size,) if num_dims == 1 else (max(1, size // 4), 4)


def check_linear_case(kernel: Any, case: PlainCase) -> None:
    """Check a product: an f32 sum, then a bias, then one rounding."""
    row = case.row
    in_dims, out_dims = (_split(case.int(f"{n}puts"), case.int(f"{n}_dims")) for n in ("in", "out"))
    x = entries(case, (case.int("rows"), *in_dims))
    rng = np.random.default_rng([case.seed, 10])
    weight = rng.normal(size=(*out_dims, *in_dims))
    weight = (np.abs(weight) if row["data"] == "one_sign" else weight).astype(case.dtype)
    bias = None if row["bias"] == "none" else rng.normal(size=out_dims).astype(case.dtype)
    finite = np.isfinite(x.astype(np.float64)).all(axis=tuple(range(1, x.ndim)))
    if row["bias"] == "cancelling" and x.shape[0]:
        bias = -oracle.linear(x[:1], weight)[0].astype(case.dtype)
    out_dtype = row["out_dtype"]
    call = functools.partial(case.configured(kernel), out_dtype=out_dtype)
    got = case.run(call, x, weight, bias)
    x, got, all_rows = x[finite], got[finite], got
    expected = oracle.linear(x, weight, bias)
    wanted = str(out_dtype or row["dtype"])
    same_type(all_rows, (case.int("rows"), *out_dims), wanted)
    sums = oracle.linear(np.abs(x), np.abs(weight), None if bias is None else np.abs(bias))
    sums = sums * oracle.f32_sum_error(math.prod(in_dims))
    smallest = float(jnp.finfo(wanted).smallest_subnormal)
    allowed = oracle.EPS[wanted] * np.abs(expected) + sums + smallest
    wide = got.astype(np.float64)
    without = None if bias is None else oracle.linear(x, weight)
    hold_rows(
        np.abs(wide - expected),
        allowed,
        "linear",
        np.flatnonzero(finite),
        rms=None if wanted == "float32" else 0.36,
        causes=causes_of(wide, expected, allowed, without),
    )


NORM_SCALES = {"tiny": 1e-3, "large": 20_000.0}
LARGE_IN_FLOAT16 = 300.0
"""Squares of numbers of this size overflow float16."""


def _norm_scale(case: PlainCase) -> float:
    scale = NORM_SCALES.get(str(case.row["size"]), 1.0)
    return min(scale, LARGE_IN_FLOAT16) if case.dtype == np.float16 else scale


def _norm_input(case: PlainCase, shape: tuple[int, ...]) -> np.ndarray:
    rng, size = case.rng(), str(case.row["size"])
    x = rng.normal(size=shape) * _norm_scale(case)
    if size == "zero":
        x[::2] = 0.0
    elif size == "outlier":
        x[..., rng.integers(0, shape[-1])] = 200.0
    elif size == "special_rows":
        _special_rows(x.reshape(math.prod(shape[:-1]), shape[-1]), case.seed)
    elif size == "halves":  # even multiples of eps, and now and then any number
        even = 1.0 + 2 * case.eps * rng.integers(0, 16, shape)
        x = np.where(np.arange(shape[-1]) % 8 == 1, 1.0 + np.abs(x) % 1.0, even)
    elif size == "nan_row" and shape[0] > 1:
        x[-1] = np.nan
        if shape[0] > 2:
            x[shape[0] // 2, ..., -1] = np.inf
    return x.astype(case.dtype)


def _norm_weight(case: PlainCase, features: int) -> np.ndarray:
    rng = np.random.default_rng([case.seed, 8])
    weight = rng.normal(size=features)
    if case.row["size"] == "halves":  # products with powers of two are not rounded
        weight = np.exp2(rng.integers(-3, 3, features)) * np.sign(weight)
    elif case.row["weight"] == "plain":
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
    eps = float(cast("float", case.row["eps"]))
    expected = oracle.rms_norm(x[real], weight, eps=eps)
    # The division may be rounded to the dtype before the product with the weight.
    smallest = float(jnp.finfo(case.dtype).smallest_subnormal)
    spread = smallest * (1 + np.abs(weight.astype(np.float64)))
    # The sum of squares may be added one by one; its root has half of the relative error.
    sums = EPS_F32 * math.sqrt(x.shape[-1]) / 2
    allowed = (2 * max(case.eps, 4e-7) + sums) * np.abs(expected) + spread
    wide = got[real].astype(np.float64)
    _hold_norm_rows(np.abs(wide - expected), allowed, real, case, what)


def _hold_norm_rows(
    error: np.ndarray, allowed: np.ndarray, real: np.ndarray, case: PlainCase, what: str
) -> None:
    features, has_few_values = error.shape[-1], case.row["size"] in ("halves", "special_rows")
    rms = None if str(case.dtype) == "float32" or has_few_values else 0.4
    bad = np.argwhere(~(error <= allowed).reshape(-1, features)) if error.size else np.array([])
    place = ""
    if bad.size:
        row = int(np.flatnonzero(real)[bad[0, 0]])
        place = f"row {row}, feature {int(bad[0, 1])}"
    hold(error, allowed, what, rms=rms, place=place)


def check_rms_norm_case(kernel: Any, case: PlainCase) -> None:
    """Check rows within two roundings of the dtype; a row of NaN must not change others."""
    x = _norm_input(case, _norm_shape(case))
    weight = _norm_weight(case, x.shape[-1])
    got = case.run(functools.partial(kernel, eps=case.row["eps"]), x, weight)
    _hold_norm(got, x, weight, case, "rms_norm")


def _hold_rounded_sum(
    normed: np.ndarray, sums: np.ndarray, weight: np.ndarray, case: PlainCase
) -> None:
    """Check the norm of exact sums f64 that are half-way between two numbers of the dtype. With
    weights of powers of two there is one rounding, at most half a step.
    """
    eps = float(cast("float", case.row["eps"]))
    rounded = sums.astype(case.dtype)
    expected = oracle.rms_norm(rounded, weight, eps=eps)
    step = case.eps * np.exp2(np.floor(np.log2(np.abs(expected))))
    allowed = step / 2 + 2e-6 * np.abs(expected)
    error = np.abs(normed.astype(np.float64) - expected)
    exact = oracle.rms_norm(sums, weight, eps=eps)
    is_exact = (np.abs(normed.astype(np.float64) - exact) <= allowed).all()
    what = "the norm of the sum"
    if is_exact and (error > allowed).any():
        what += (
            " (it is the norm of the sum before its rounding; XLA leaves such a rounding out unless"
            " jax.lax.reduce_precision asks for it)"
        )
    _hold_norm_rows(error, allowed, np.ones(sums.shape[:-1], bool).ravel(), case, what)


def check_add_rms_norm_case(kernel: Any, case: PlainCase) -> None:
    """Check that the sum is that of the dtype bit by bit, and its norm within two roundings."""
    size = str(case.row["size"])
    x = _norm_input(case, _norm_shape(case))
    residual = np.random.default_rng([case.seed, 9]).normal(size=x.shape)
    residual = residual * _norm_scale(case)
    if size in ("zero", "special_rows"):
        residual[::2] = 0
    elif size == "halves":
        residual = np.where(np.arange(x.shape[-1]) % 8 == 1, 0.0, case.eps / 2)
    residual = residual.astype(case.dtype)
    weight = _norm_weight(case, x.shape[-1])
    normed, total = case.run(functools.partial(kernel, eps=case.row["eps"]), x, residual, weight)
    same_type(total, x.shape, x.dtype)
    real = np.isfinite(x.astype(np.float64))
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = x + residual
    expect((total == wanted)[real].all(), "the sum differs from that of its dtype")
    _hold_norm(normed, total, weight, case, "the norm of the sum")
    if size == "halves" and x.dtype != np.float32 and x.size:
        sums = x.astype(np.float64) + residual.astype(np.float64)
        _hold_rounded_sum(normed, sums, weight, case)


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
    layout: KVLayout | None = None,
) -> None:
    """Raise AssertionError unless the features are rotated within rounding.

    The bound includes the rounding of angles. Features after rotary_dim must be unchanged. Where
    `got` was read from a layout, all are within what it may lose of the rotated head.
    """
    same_type(got, x.shape, x.dtype)
    if not x.size:
        return
    turned = oracle.rope(x, positions, spec)
    lost: Any = 0.0 if layout is None else allowed_errors(layout, turned)
    kept = (each[..., spec.rotary_dim :].astype(np.float64) for each in (got, x))
    is_same = (np.abs(np.subtract(*kept)) <= lost).all()
    expect(is_same, f"{what}: features after rotary_dim have changed")
    factor = oracle.rope_frequencies(spec)[1]
    wide = np.abs(x.astype(np.float64))
    half = spec.rotary_dim // 2
    pairs = wide[..., :half] + wide[..., half : spec.rotary_dim]
    # An f32 angle has its own rounding error and that of its frequency.
    angle = EPS_F32 * (2.0 + positions)[:, None, None]
    expected = turned[..., : spec.rotary_dim]
    allowed = np.concatenate([pairs, pairs], axis=-1) * factor * (2 * angle + 4 * EPS_F32)
    allowed = (
        allowed
        + oracle.EPS[str(x.dtype)] * np.abs(expected)
        + float(jnp.finfo(x.dtype).smallest_subnormal)
        + lost
    )
    error = np.abs(got[..., : spec.rotary_dim].astype(np.float64) - expected)
    is_rounded = layout is not None and layout.tolerance
    rms = None if str(x.dtype) == "float32" or is_rounded else 0.36
    hold(error, allowed, what, rms=rms, axes=("token", "head", "feature"))


def check_rope_case(kernel: Any, case: PlainCase) -> None:
    """Check rotated features within one rounding of f32 arithmetic."""
    spec, tokens = rope_spec(case), case.int("tokens")
    positions = rope_positions(case, tokens)
    x = case.rng().normal(size=(tokens, case.int("heads"), case.int("head_dim"))).astype(case.dtype)
    others = other_inputs((x, positions), with_integers=True)
    got = case.run(functools.partial(kernel, spec=spec), x, positions, others=others)
    hold_turned(got, x, positions, spec, "rope")


def embedding_ids(case: PlainCase, vocab: int) -> np.ndarray:
    """Return ids int32 [tokens] for the axis `ids`; each set of inputs has others."""
    tokens = case.int("tokens")
    kinds = {
        "mixed": case.rng().integers(0, vocab, tokens),
        "last": np.full(tokens, vocab - 1 - case.seed % vocab),
        "equal": np.full(tokens, (vocab // 2 + case.seed) % vocab),
        "all": (np.arange(tokens) + 3 * case.seed) % vocab,
    }
    return kinds[str(case.row["ids"])].astype(np.int32)


def check_embedding_case(kernel: Any, case: PlainCase) -> None:
    """Check that each row equals the table's bit by bit; also NaN, infinities, negative zeros, and
    the largest and smallest numbers.
    """
    vocab, numbers = case.int("vocab"), jnp.finfo(case.dtype)
    rng = np.random.default_rng([case.seed, 10])
    table = rng.normal(size=(vocab, case.int("features"))).astype(case.dtype)
    table[0, 0], table[-1, -1] = -0.0, np.inf
    table[vocab // 2, 0] = np.nan
    table[vocab // 3, -1] = numbers.smallest_subnormal
    table[vocab // 4, -1] = numbers.max
    ids = embedding_ids(case, vocab)
    got = case.run(kernel, table, ids, others=other_inputs((table, ids), with_integers=True))
    same_type(got, (len(ids), table.shape[1]), table.dtype)
    hold_copies(got, table, ids)
