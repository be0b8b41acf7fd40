"""The check of grouped_linear, with cases from its axes."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from enginebay_testing import oracle
from enginebay_testing.case_runs import other_inputs
from enginebay_testing.op_kit import PlainCase
from enginebay_testing.verdicts import expect
from enginebay_xla.kit.places import causes_of, hold_rows
from enginebay_xla.kit.plain import entries, same_type


def group_sizes(kind: str, groups: int, seed: int) -> np.ndarray:
    """Return int32 [groups] for a value of the axis `sizes`. Other seeds divide as many rows in
    another way, because the sets of inputs of a case have the same shapes.
    """
    rng = np.random.default_rng([groups, 12])
    sizes = rng.integers(1, 40, groups) * rng.integers(0, 2, groups)
    sizes[groups // 2] += 3
    if kind == "one_each":
        sizes = np.ones(groups, int)
    elif kind == "one_has_all":
        sizes = np.where(np.arange(groups) == rng.integers(0, groups), 521, 0)
    elif kind == "even":
        sizes = np.full(groups, 8)
    elif kind == "none":
        sizes = np.zeros(groups, int)
    ends = int(kind == "empty_ends" and groups > 2)
    if ends:
        sizes = sizes + 1
        sizes[[0, -1]] = 0
    inside = slice(ends, groups - ends)
    sizes[inside] = np.roll(sizes[inside], seed)
    if kind in ("one_each", "even") and groups > 1 and seed:
        sizes[seed % groups] -= 1
        sizes[(seed + 1) % groups] += 1
    return sizes.astype(np.int32)


def check_grouped_linear_case(kernel: Any, case: PlainCase) -> None:
    """Check each row against the product with its group's weight, an f32 sum and one rounding.

    Rows after the last group must be 0. A row of NaN, and weights of groups without rows, must not
    change other rows.
    """
    row, rng = case.row, np.random.default_rng([case.seed, 10])
    sizes = group_sizes(str(row["sizes"]), case.int("groups"), case.seed)
    count = int(sizes.sum())
    shape = (count + case.int("past"), case.int("inputs"))
    x = entries(case, shape)
    weight = rng.normal(size=(len(sizes), case.int("outputs"), shape[1]))
    if row["data"] == "one_sign":
        weight = np.abs(weight)
    if row["unused"] == "nan":
        weight[sizes == 0] = np.nan
    weight = weight.astype(case.dtype)
    out_dtype = row["out_dtype"]
    others = other_group_inputs(x, weight, sizes)
    got = case.run(functools.partial(kernel, out_dtype=out_dtype), x, weight, sizes, others=others)
    wanted = str(out_dtype or row["dtype"])
    same_type(got, (shape[0], weight.shape[1]), wanted)
    expect(not got[count:].astype(np.float64).any(), "rows after the last group are not 0")
    finite = np.isfinite(x[:count].astype(np.float64)).all(axis=1)
    x = np.where(finite[:, None], x[:count], 0)
    expected = oracle.grouped_linear(x, weight, sizes)
    sums = oracle.grouped_linear(np.abs(x), np.abs(weight), sizes)
    sums = sums * oracle.f32_sum_error(shape[1])
    smallest = float(jnp.finfo(wanted).smallest_subnormal)
    allowed = oracle.EPS[wanted] * np.abs(expected) + sums + smallest
    wide = got[:count].astype(np.float64)[finite]
    hold_rows(
        np.abs(wide - expected[finite]),
        allowed[finite],
        "grouped_linear",
        np.flatnonzero(finite),
        rms=None if wanted == "float32" else 0.36,
        causes=causes_of(wide, expected[finite], allowed[finite], None),
    )


def other_group_inputs(x: np.ndarray, weight: Any, sizes: np.ndarray) -> tuple[Any, ...]:
    """Return other inputs of the same shapes, without rows after the last group."""
    x, weight, others = other_inputs((x, weight, sizes), with_integers=True)
    others[len(sizes) // 2] += len(x) - int(sizes.sum())
    return x, weight, others
