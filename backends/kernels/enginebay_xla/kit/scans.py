"""The check and the programs of ssd_scan, whose state has one place per row."""

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
from enginebay_xla.kit.states import FREE_PLACES, MAX_TOKENS, PADDING, STEPS, row_lengths
from enginebay_xla.ssd_scan import SCAN

HEADS, HEAD_DIM, STATE_SIZE = 48, 64, 128
"""Sizes of Granite 4 tiny; its heads share one group."""

ROUNDINGS = 8
"""Roundings to f32 that a token may add to a state and to a sum over it."""


def _step(*inputs: Any, kernel: Any, bucket: Bucket) -> Any:
    *arrays, state, new, total, table = inputs
    batch = derive_batch(new, total, table, MAX_TOKENS, bucket)
    return kernel(*arrays, {SCAN: state}, batch)


def _inputs(case: PlainCase, rng: np.random.Generator, tokens: int) -> list[Any]:
    """Return x, dt, decay, b, c and skip."""
    row, groups = case.row, case.int("groups")
    heads, size = groups * case.int("heads_each"), case.int("state_size")
    x = spread_entries(rng, (tokens, heads * case.int("head_dim")), str(row["data"]))
    dt = np.exp(rng.uniform(-5, 0, (tokens, heads)))
    if row["decay"] == "steep":
        dt *= np.where(rng.random((tokens, heads)) < 0.2, 50, 0.01)
    decay = -np.exp(rng.uniform(0, 2.5, heads)) * (row["decay"] != "none")
    b, c = rng.normal(size=(2, tokens, groups, size))
    skip = rng.normal(size=heads).astype(case.dtype) if row["skip"] == "plain" else None
    return [
        x.reshape(tokens, heads, -1).astype(case.dtype),
        dt.astype(np.float32),
        decay.astype(np.float32),
        b.astype(case.dtype),
        c.astype(case.dtype),
        skip,
    ]


def check_ssd_scan_case(kernel: Any, case: PlainCase) -> None:
    """Check outputs and states against one token after the other in f64.

    Each token may add some roundings to the state, which fade as the state does. Places of no row
    are NaN and must stay so.
    """
    rng = case.rng()
    # Shapes depend on the row alone, so that all sets of inputs share a program.
    lengths = np.random.default_rng([7, case.int("rows")])
    new, before = row_lengths(str(case.row["lengths"]), case.int("rows"), lengths)
    rows, count = len(new), int(new.sum())
    places = rng.permutation(rows + FREE_PLACES)[:rows].astype(np.int32)
    inputs = _inputs(case, rng, count + PADDING)
    x, b = inputs[0], inputs[3]
    shape = (*x.shape[1:], b.shape[-1])
    state = np.full((rows + FREE_PLACES, *shape), np.nan, np.float32)
    for place, length in zip(places, before, strict=True):
        if length:
            state[place] = rng.normal(size=shape)
    bucket = Bucket(len(x), rows, 1, int(new.max()), MAX_TOKENS)

    got, after = case.run(
        functools.partial(_step, kernel=kernel, bucket=bucket),
        *(*inputs, state, new, np.where(new, new + before, 0), places[:, None]),
    )
    same_type(got, x.shape, case.dtype)
    same_type(after[SCAN], state.shape, np.dtype(np.float32))
    ends = np.cumsum(new)
    for place, end, num, length in zip(places, ends, new, before, strict=True):
        if num:
            held = state[place] if length else np.zeros(shape, np.float32)
            own = [one[end - num : end] if i not in (2, 5) else one for i, one in enumerate(inputs)]
            _hold_row(got[end - num : end], after[SCAN][place], held, own, case)
    others = np.setdiff1d(np.arange(len(state)), places[new > 0])
    same = after[SCAN][others].tobytes() == state[others].tobytes()
    expect(same, "a place was written that belongs to no row with tokens")


def _hold_row(
    got: np.ndarray, after: np.ndarray, held: np.ndarray, inputs: list[Any], case: PlainCase
) -> None:
    """Check the tokens of one row, and its state after them, unless an input is an infinity."""
    if not np.isfinite(inputs[0].astype(np.float64)).all():
        return
    x, dt, decay, b, c = (one.astype(np.float64) for one in inputs[:5])
    heads = x.shape[1]
    b, c = (np.repeat(one, heads // one.shape[1], axis=1) for one in (b, c))
    skip = np.zeros(heads) if inputs[5] is None else inputs[5].astype(np.float64)
    state = held.astype(np.float64)
    size, slack = np.abs(state), np.zeros(state.shape)
    eps, smallest = oracle.EPS[str(case.row["dtype"])], float(jnp.finfo(case.dtype).tiny)
    for token in range(len(x)):
        fade = np.exp(dt[token] * decay)[:, None, None]
        added = (dt[token, :, None] * x[token])[..., None] * b[token, :, None]
        state, size = fade * state + added, fade * size + np.abs(added)
        slack = fade * slack + ROUNDINGS * EPS_F32 * size
        each, direct = np.abs(c[token, :, None]), skip[:, None] * x[token]
        exact = (state * c[token, :, None]).sum(axis=-1) + direct
        sizes = (size * each).sum(axis=-1) + np.abs(direct)
        allowed = eps * np.abs(exact) + (slack * each).sum(axis=-1) + smallest
        allowed += ROUNDINGS * EPS_F32 * sizes
        hold(np.abs(got[token].astype(np.float64) - exact), allowed, "ssd_scan")
    hold(np.abs(after - state), slack + float(np.finfo(np.float32).tiny), "the state of ssd_scan")


def ssd_scan(kernel: Any, env: Env, number: int, layouts: LayoutTypes) -> Iterator[OpProgram]:
    """Yield a step of each kind over donated places; there are four snapshots per row."""
    for tokens, rows, longest, mode in STEPS:
        for dtype in ("bfloat16", "float32"):
            wide, kept = jnp.dtype(dtype), jnp.dtype("float32")
            state = jax.ShapeDtypeStruct((1 + 5 * rows, HEADS, HEAD_DIM, STATE_SIZE), kept)
            arguments = (
                jax.ShapeDtypeStruct((tokens, HEADS, HEAD_DIM), wide),
                jax.ShapeDtypeStruct((tokens, HEADS), kept),
                jax.ShapeDtypeStruct((HEADS,), kept),
                jax.ShapeDtypeStruct((tokens, 1, STATE_SIZE), wide),
                jax.ShapeDtypeStruct((tokens, 1, STATE_SIZE), wide),
                jax.ShapeDtypeStruct((HEADS,), wide),
            )
            batch = batch_of(Bucket(tokens, rows, 1, longest, 4096, mode))  # type: ignore[arg-type]
            yield OpProgram(
                name=f"ssd_scan_{mode}_{tokens}x{HEADS}_{dtype}",
                function=kernel,
                arguments=(*arguments, {SCAN: state}, batch),
                donated=(6,),
                representative=dtype == "bfloat16" and mode == "decode",
                traits={"dtype": dtype},
                kept_bytes=state.size * state.dtype.itemsize,
            )
