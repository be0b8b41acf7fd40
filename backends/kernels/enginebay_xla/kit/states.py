"""The check and the programs of short_conv, whose state has one place per row."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.ops.batches import derive_batch
from enginebay.ops.caps import Env
from enginebay.ops.spec import Bucket
from enginebay_testing import oracle
from enginebay_testing.compile_suite import batch_of
from enginebay_testing.exact import hold
from enginebay_testing.op_kit import LayoutTypes, OpProgram, PlainCase
from enginebay_testing.verdicts import expect
from enginebay_xla.kit.plain import EPS_F32, same_type, spread_entries
from enginebay_xla.short_conv import INPUTS

MAX_TOKENS, PADDING, FREE_PLACES = 512, 3, 2
"""Tokens per row, at most; padding tokens after the rows; places that belong to no row."""

STEPS = ((32, 32, 1, "decode"), (2048, 4, 2048, "prefill"), (512, 32, 512, "mixed"))
"""(tokens, rows, longest chunk, mode) of each compiled step."""
CHANNELS, TAPS = 2048, 3
"""Channels and taps of LFM2 1.2B."""


LONG = 300
"""Tokens of a long chunk: more than 8 bits hold."""


def row_lengths(kind: str, rows: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return new tokens and earlier tokens per row, int32 [rows] each.

    They are for a value of the axis `lengths`, in the order of a step's rows.
    """
    new, before = rng.integers(1, 12, rows), rng.integers(1, 30, rows) * rng.integers(0, 2, rows)
    if kind == "one_each":
        new, before = np.ones(rows, int), rng.integers(1, 30, rows)
    elif kind == "begin":
        before = np.zeros(rows, int)
    elif kind == "go_on":
        before = rng.integers(1, 30, rows)
    elif kind == "padded" and rows > 1:
        new[-1] = before[-1] = 0
    elif kind == "long":
        new[0], before[0] = LONG, before[0] % 2
    group = np.where((new == 1) & (before > 0), 0, np.where(before == 0, 1, 2)) + 3 * (new == 0)
    order = np.argsort(group, kind="stable")
    return new[order].astype(np.int32), before[order].astype(np.int32)


def _step(
    x: Any,
    weight: Any,
    bias: Any,
    state: Any,
    new: Any,
    total: Any,
    table: Any,
    *,
    kernel: Any,
    bucket: Bucket,
) -> Any:
    batch = derive_batch(new, total, table, MAX_TOKENS, bucket)
    return kernel(x, weight, bias, {INPUTS: state}, batch)


def check_short_conv_case(kernel: Any, case: PlainCase) -> None:
    """Check outputs and states.

    Each output is an f32 sum and one rounding. The state of each row is its last inputs, bit by
    bit. Other places are NaN and must stay so.
    """
    row, rng = case.row, case.rng()
    taps, channels = case.int("taps"), case.int("channels")
    # Shapes depend on the row alone, so that all sets of inputs share a program.
    lengths = np.random.default_rng([7, case.int("rows")])
    new, before = row_lengths(str(row["lengths"]), case.int("rows"), lengths)
    rows, count = len(new), int(new.sum())
    places = rng.permutation(rows + FREE_PLACES)[:rows].astype(np.int32)
    state = np.full((rows + FREE_PLACES, taps - 1, channels), np.nan).astype(case.dtype)
    seen = [rng.normal(size=(taps - 1, channels)).astype(case.dtype) for _ in range(rows)]
    for values, place, length in zip(seen, places, before, strict=True):
        values[: max(0, taps - 1 - length)] = 0  # inputs before the first position
        if length:
            state[place] = values
    x = spread_entries(rng, (count + PADDING, channels), str(row["data"])).astype(case.dtype)
    weight = rng.normal(size=(channels, taps)).astype(case.dtype)
    bias = rng.normal(size=channels).astype(case.dtype) if row["bias"] == "plain" else None
    bucket = Bucket(len(x), rows, 1, int(new.max()), MAX_TOKENS)

    got, after = case.run(
        functools.partial(_step, kernel=kernel, bucket=bucket),
        *(x, weight, bias, state, new, np.where(new, new + before, 0), places[:, None]),
    )
    same_type(got, x.shape, case.dtype)
    same_type(after[INPUTS], state.shape, case.dtype)
    wanted, ends, wide = state.copy(), np.cumsum(new), weight.astype(np.float64)
    for values, place, end, num in zip(seen, places, ends, new, strict=True):
        inputs = np.concatenate([values, x[end - num : end]])
        if num:
            wanted[place] = inputs[num:]
        windows = [inputs[at : at + taps].astype(np.float64).T for at in range(num)]
        sums = [(window * wide).sum(axis=1) for window in windows]
        sizes = [np.abs(window * wide).sum(axis=1) for window in windows]
        _hold(got[end - num : end], np.array(sums), np.array(sizes), bias, case)
    expect(
        after[INPUTS].tobytes() == wanted.tobytes(),
        "the state is not the last inputs of the rows, or another place was written",
    )


def _hold(
    got: np.ndarray, sums: np.ndarray, sizes: np.ndarray, bias: np.ndarray | None, case: PlainCase
) -> None:
    """Check the tokens of one row; tokens that a NaN or an infinity reaches have that number."""
    if not len(got):
        return
    total = sums if bias is None else sums + bias.astype(np.float64)
    sizes = sizes if bias is None else sizes + np.abs(bias.astype(np.float64))
    finite = np.isfinite(total)
    smallest = float(jnp.finfo(case.dtype).smallest_subnormal)
    allowed = oracle.EPS[str(case.row["dtype"])] * np.abs(total) + 4 * EPS_F32 * sizes + smallest
    wide = got.astype(np.float64)
    expect(
        np.array_equal(wide[~finite], total[~finite], equal_nan=True),
        "a token that a NaN or an infinity reaches has another number than that",
    )
    hold(np.abs(wide[finite] - total[finite]), allowed[finite], "short_conv")


def short_conv(kernel: Any, env: Env, number: int, layouts: LayoutTypes) -> Iterator[OpProgram]:
    """Yield a step of each kind over donated places; there are four snapshots per row."""
    for tokens, rows, longest, mode in STEPS:
        for dtype in ("bfloat16", "float32"):
            state = jax.ShapeDtypeStruct((1 + 5 * rows, TAPS - 1, CHANNELS), jnp.dtype(dtype))
            x = jax.ShapeDtypeStruct((tokens, CHANNELS), jnp.dtype(dtype))
            weight = jax.ShapeDtypeStruct((CHANNELS, TAPS), jnp.dtype(dtype))
            batch = batch_of(Bucket(tokens, rows, 1, longest, 4096, mode))  # type: ignore[arg-type]
            yield OpProgram(
                name=f"short_conv_{mode}_{tokens}x{CHANNELS}_{dtype}",
                function=lambda x, weight, state, batch: kernel(x, weight, None, state, batch),
                arguments=(x, weight, {INPUTS: state}, batch),
                donated=(2,),
                representative=dtype == "bfloat16" and mode == "decode",
                traits={"dtype": dtype},
                kept_bytes=state.size * state.dtype.itemsize,
            )
