"""How implementations of the op lora are checked."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.ops.caps import Env
from enginebay_byhand.cases import CheckSetting, QuickCase
from enginebay_lora.ops import lora_oracle
from enginebay_testing import oracle
from enginebay_testing.covering import DTYPES, OpAxes
from enginebay_testing.exact import hold
from enginebay_testing.op_kit import LayoutTypes, OpKit, OpProgram, PlainCase, covering_cases
from enginebay_testing.verdicts import expect

LORA_AXES = OpAxes(
    "lora",
    {
        "dtype": DTYPES,
        "tokens": (5, 1, 33, 300, 0),
        "slots": (4, 1, 9, 40),
        "rank": (8, 1, 3),
        "inputs": (40, 129, 7),
        "outputs": (48, 1, 257),
        "in_dims": (1, 2),
        "out_dims": (1, 3),
        "parts": (1, 3),
        "used": ("mixed", "none", "one_has_all", "last_only"),
        "data": ("plain", "rows_apart", "nan_row"),
    },
)
"""parts: q, k and v of one weight, along the last but one of its dimensions if it has several.

used: which adapter each token has; "mixed": any, and the second token has none; "none": no token
has one; "last_only": only the last token, that of the last slot. data "rows_apart": rows of very
different magnitude; "nan_row": one row is NaN and must not change the others.
"""


def adapter_places(used: str, tokens: int, slots: int, rng: np.random.Generator) -> np.ndarray:
    """Return int32 [tokens] for a value of the axis `used`."""
    places = rng.integers(0, slots + 1, tokens)
    places[1:2] = 0
    if used == "none":
        places = np.zeros(tokens, int)
    elif used == "one_has_all":
        places = np.full(tokens, rng.integers(1, slots + 1))
    elif used == "last_only":
        places = np.where(np.arange(tokens) == tokens - 1, slots, 0)
    return places.astype(np.int32)


def _split(size: int, dims: int) -> tuple[int, ...]:
    """Return `dims` sizes whose product is close to `size`."""
    return (size,) if dims == 1 else (*(2,) * (dims - 1), max(1, size // 2 ** (dims - 1)))


def part_ends(parts: int, outputs: int) -> tuple[int, ...]:
    """Return the ends of parts of different sizes, as far as there are outputs; () for one part."""
    if parts == 1:
        return ()
    rest = [max(0, outputs - parts + 1 + i) for i in range(parts)]
    return (*rest[:-1], outputs)


def check_lora_case(kernel: Any, case: PlainCase) -> None:
    """Check each token against float64, within an f32 sum and two roundings.

    Tokens without an adapter must be unchanged, bit by bit.
    """
    row, rng, tokens, slots = case.row, case.rng(), case.int("tokens"), case.int("slots")
    in_dims = _split(case.int("inputs"), case.int("in_dims"))
    out_dims = _split(case.int("outputs"), case.int("out_dims"))
    axis = max(0, len(out_dims) - 2)
    how: Any = {"axis": axis, "ends": part_ends(case.int("parts"), out_dims[axis])}
    x, y = rng.normal(size=(tokens, *in_dims)), rng.normal(size=(tokens, *out_dims))
    rank = case.int("rank")
    a = rng.normal(size=(slots, case.int("parts"), rank, *in_dims))
    b = rng.normal(size=(slots, rank, *out_dims))
    if row["data"] == "rows_apart":
        x = x * (10.0 ** rng.integers(-2, 2, tokens)).reshape(-1, *[1] * len(in_dims))
    elif row["data"] == "nan_row" and tokens > 1:
        x[-1] = np.nan
    y, x, a, b = (each.astype(case.dtype) for each in (y, x, a, b))
    places = adapter_places(str(row["used"]), tokens, slots, rng)
    got = case.run(functools.partial(kernel, **how), y, x, a, b, places)
    expect(got.shape == y.shape, f"shape {got.shape}, where y has {y.shape}")
    expect(got.dtype == y.dtype, f"dtype {got.dtype}, where y has {y.dtype}")
    expect((got[places == 0] == y[places == 0]).all(), "tokens without an adapter have changed")
    real = np.isfinite(x.astype(np.float64)).all(axis=tuple(range(1, x.ndim)))
    few = (y[real], x[real], a, b, places[real])
    expected = lora_oracle(*few, **how)
    sums = lora_oracle(*(np.abs(each) for each in few), **how)
    # The error of x a counts in the product with b, and errors of an f32 sum grow with the root of
    # their number.
    count = max(4.0, float(np.sqrt(np.prod(in_dims))))
    small = float(jnp.finfo(case.dtype).smallest_subnormal)
    allowed = case.eps * np.abs(expected) + sums * (count * oracle.EPS["float32"] + small) + small
    if case.dtype != np.dtype("float32"):
        allowed = allowed + case.eps * sums
    hold(np.abs(got[real].astype(np.float64) - expected), allowed, "lora", rms=None)


def lora_programs(kernel: Any, env: Env, number: int, layouts: LayoutTypes) -> Iterator[OpProgram]:
    """Yield 8 adapters of rank 16 for the widest layers of a model, with rows of a decode and of a
    prompt.
    """
    for tokens in (1, 32, 512):
        for outputs, inputs in ((4096, 4096), (14336, 4096)):
            shapes = ((tokens, outputs), (tokens, inputs), (8, 1, 16, inputs), (8, 16, outputs))
            arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
            yield OpProgram(
                f"lora_{tokens}x8x{outputs}x{inputs}",
                kernel,
                (*arrays, jax.ShapeDtypeStruct((tokens,), jnp.int32)),
                representative=(tokens, outputs) == (32, 4096),
                traits={"dtype": "bfloat16"},
            )


LORA_KIT = OpKit(covering_cases(LORA_AXES, check_lora_case), lora_programs)


def lora_quick_cases(setting: CheckSetting) -> Iterator[QuickCase]:
    """Yield cases of no adapter, of several, and of more tokens, with heads in and out."""
    cases: dict[str, tuple[list[int], tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
        "none": ([0, 0, 0], (48,), (40,), ()),
        "mixed": ([2, 0, 3, 1, 2, 0], (48,), (5, 8), ()),
        "one token": ([3], (6, 8), (40,), (3, 5, 6)),
        "many tokens": ([1, 0, 3] * 60, (48,), (40,), ()),
        "parts": ([1, 0, 3, 3], (48,), (40,), (40, 48)),
    }
    rng = np.random.default_rng(0)
    for name, (places, out_dims, in_dims, ends) in cases.items():
        down = (3, max(1, len(ends)), 4, *in_dims)
        shapes = ((len(places), *out_dims), (len(places), *in_dims), down)
        arrays = [
            rng.normal(size=shape).astype(jnp.dtype(setting.dtype))
            for shape in (*shapes, (3, 4, *out_dims))
        ]
        yield QuickCase(
            f"lora {setting.dtype} {name}",
            functools.partial(_run, ends),
            (*arrays, np.array(places, np.int32)),
        )


def _run(ends: tuple[int, ...], impl: Any, *inputs: jax.Array) -> dict[str, jax.Array]:
    return {"out": impl(*inputs, ends=ends)}
