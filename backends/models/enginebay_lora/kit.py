"""How implementations of the op lora are checked."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.compose.quick_cases import CheckSetting, QuickCase
from enginebay.ops.caps import Env
from enginebay_lora.ops import part_slices
from enginebay_testing import oracle
from enginebay_testing.case_runs import other_inputs
from enginebay_testing.covering import DTYPES, OpAxes
from enginebay_testing.exact import hold
from enginebay_testing.op_kit import LayoutTypes, OpKit, OpProgram, PlainCase, covering_cases
from enginebay_testing.verdicts import expect

LORA_AXES = OpAxes(
    "lora",
    {
        "dtype": DTYPES,
        "y_dtype": ("same", "float32"),
        "tokens": (5, 1, 33, 513, 0),
        "slots": (4, 1, 9, 40),
        "rank": (8, 1, 3, 16, 64),
        "inputs": (40, 129, 7, 1025),
        "outputs": (48, 1, 257),
        "in_dims": (1, 2),
        "out_dims": (1, 3),
        "parts": (1, 3),
        "used": ("mixed", "none", "one_has_all", "last_only"),
        "data": ("plain", "one_sign", "rows_apart", "nan_row", "special_rows"),
    },
    never=tuple(
        (one, size, other, second)
        for one, sizes, other, others in (
            ("slots", (40, 64, 65, 128), "inputs", (1025, 2049, 4097)),
            ("slots", (64, 65, 128), "rank", (64, 65, 128)),
            ("tokens", (513, 1025, 2049), "inputs", (2049, 4097)),
            ("tokens", (1025, 2049), "outputs", (1025, 4097)),
            ("inputs", (1025, 2049, 4097), "outputs", (1025, 4097)),
        )
        for size in sizes
        for second in others
    ),
    more={
        "tokens": (2, 16, 31, 32, 64, 65, 127, 128, 129, 255, 256, 257, 300, 512, 1025, 2049),
        "slots": (2, 8, 16, 17, 33, 64, 65, 128),
        "rank": (2, 4, 5, 12, 15, 17, 31, 32, 33, 65, 128),
        "inputs": (16, 32, 33, 64, 127, 128, 255, 256, 257, 512, 513, 2049, 4097),
        "outputs": (16, 32, 33, 64, 127, 128, 129, 256, 512, 513, 1025, 4097),
    },
    blocks=("tokens", "rank", "inputs", "outputs"),
    extremes=(
        {"tokens": 65_609},
        {"slots": 300, "tokens": 33, "rank": 3},
        {"rank": 257},
        {"inputs": 16_411},
        {"inputs": 16_411, "tokens": 3},
        {"data": "nan_row"},
        {"outputs": 65_609, "rank": 3},
    ),
)
"""parts: q, k and v of one weight, along the last but one of its dimensions if it has several.
y_dtype: y may be wider than x.

used: which adapter each token has; "mixed": any, and the second token has none; "none": no token
has one; "last_only": only the last token, that of the last slot (of the first, in a second set of
inputs). data "one_sign": no number is negative, so that sums grow; "rows_apart": rows of very
different magnitude; "nan_row": one row is NaN and must not change the others; "special_rows": rows
of zeros, of equal numbers, and with the largest number last.
"""


def adapter_places(
    used: str, tokens: int, slots: int, rng: np.random.Generator, turn: int = 0
) -> np.ndarray:
    """Return int32 [tokens] for a value of the axis `used`. `turn` is the number of the set of
    inputs.
    """
    places = rng.integers(0, slots + 1, tokens)
    places[1:2] = 0
    if used == "none":
        places = np.zeros(tokens, int)
    elif used == "one_has_all":
        places = np.full(tokens, rng.integers(1, slots + 1))
    elif used == "last_only":
        places = np.where(np.arange(tokens) == tokens - 1, 1 if turn % 2 else slots, 0)
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


def _arrays(case: PlainCase, in_dims: tuple[int, ...], out_dims: tuple[int, ...]) -> list[Any]:
    """Return y, x, a and b."""
    row, rng, tokens, slots = case.row, case.rng(), case.int("tokens"), case.int("slots")
    x, y = rng.normal(size=(tokens, *in_dims)), rng.normal(size=(tokens, *out_dims))
    rank, kind = case.int("rank"), row["data"]
    a = rng.normal(size=(slots, case.int("parts"), rank, *in_dims))
    b = rng.normal(size=(slots, rank, *out_dims))
    each = x.reshape(tokens, math.prod(in_dims))
    if kind == "one_sign":
        y, x, a, b = (np.abs(array) for array in (y, x, a, b))
    elif kind == "rows_apart":
        each *= 10.0 ** rng.integers(-2, 2, (tokens, 1))
    elif kind == "nan_row" and tokens > 1:
        x[-1] = np.nan
    elif kind == "special_rows":
        kinds = (np.arange(tokens) + case.seed) % 4
        each[kinds == 0] = 0.0
        each[kinds == 1, -1] = 30.0
        each[kinds == 2] = each[kinds == 2, :1]
    y_dtype = case.dtype if row["y_dtype"] == "same" else np.float32
    return [y.astype(y_dtype), *(array.astype(case.dtype) for array in (x, a, b))]


def _exact_and_errors(
    x: np.ndarray, a: np.ndarray, b: np.ndarray, slot: int, how: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Return x a b of the rows of one slot, f64 [T, *outputs], and bounds on its error.

    Sums are f32, whose errors grow with the root of their number. x a may be rounded to x's dtype;
    the errors of its numbers are independent of each other.
    """
    rows = x.reshape(len(x), math.prod(x.shape[1:])).astype(np.float64)
    exact, errors = (np.zeros((len(x), *b.shape[2:])) for _ in range(2))
    rank = b.shape[1]
    narrow = 0.0 if x.dtype == np.float32 else oracle.EPS[str(x.dtype)]
    smallest = float(jnp.finfo(x.dtype).smallest_subnormal)
    for part, where in part_slices(b.shape[2:], how["axis"], how["ends"]):
        down = a[slot, part].reshape(rank, rows.shape[1]).astype(np.float64).T
        at: Any = (slot, slice(None), *where)
        up = b[at].astype(np.float64)
        flat = up.reshape(rank, math.prod(up.shape[1:]))
        shrunk, sums = rows @ down, np.abs(rows) @ np.abs(down)
        lost = sums * oracle.f32_sum_error(rows.shape[1]) + smallest
        lost = lost + np.abs(shrunk) * oracle.f32_sum_error(rank)
        all_of = lost @ np.abs(flat) + narrow * np.minimum(
            np.abs(shrunk) @ np.abs(flat) / 2, 1.5 * np.sqrt(shrunk**2 @ flat**2)
        )
        shape = (len(x), *up.shape[1:])
        exact[(slice(None), *where)] = (shrunk @ flat).reshape(shape)
        errors[(slice(None), *where)] = all_of.reshape(shape)
    return exact, errors


def check_lora_case(kernel: Any, case: PlainCase) -> None:
    """Check each token against float64, within an f32 sum and two roundings.

    Tokens without an adapter must be unchanged, bit by bit.
    """
    tokens, slots = case.int("tokens"), case.int("slots")
    in_dims = _split(case.int("inputs"), case.int("in_dims"))
    out_dims = _split(case.int("outputs"), case.int("out_dims"))
    axis = max(0, len(out_dims) - 2)
    how: Any = {"axis": axis, "ends": part_ends(case.int("parts"), out_dims[axis])}
    y, x, a, b = _arrays(case, in_dims, out_dims)
    rng = np.random.default_rng([case.seed, 10])
    places = adapter_places(str(case.row["used"]), tokens, slots, rng, case.seed)
    if case.row["data"] == "nan_row" and case.seed % 2:  # NaN times 0 is NaN
        places[-1:] = 0
    call, inputs = functools.partial(case.configured(kernel), **how), (y, x, a, b, places)
    got = case.run(call, *inputs, others=other_inputs(inputs, with_integers=True))
    expect(got.shape == y.shape, f"shape {got.shape}, where y has {y.shape}")
    expect(got.dtype == y.dtype, f"dtype {got.dtype}, where y has {y.dtype}")
    expect((got[places == 0] == y[places == 0]).all(), "tokens without an adapter have changed")
    real = np.isfinite(x.astype(np.float64)).all(axis=tuple(range(1, x.ndim)))
    dtype = str(y.dtype)
    for place in np.unique(places[real & (places > 0)]):
        mine = np.flatnonzero(real & (places == place))
        exact, errors = _exact_and_errors(x[mine], a, b, int(place) - 1, how)
        base = y[mine].astype(np.float64)
        expected = base + exact
        unit = 4 * oracle.EPS["float32"]
        allowed = oracle.EPS[dtype] * np.abs(expected) + errors + unit * (np.abs(base) + 1e-30)
        wide = got[mine].astype(np.float64)
        error = np.abs(wide - expected)
        what = _named(wide, base, error, allowed, mine, int(place))
        # All outputs of a token share the roundings of its x a. The relative error of one rounding
        # has a root mean square of 0.425 of its largest; that of a sum of several has less.
        rank = case.int("rank")
        chance = 1.0 / math.sqrt(len(mine) * case.int("parts") * rank)
        hold(error, allowed, what, rms=0.43 if rank == 1 else 0.4, chance=chance)


def _named(
    wide: np.ndarray,
    base: np.ndarray,
    error: np.ndarray,
    allowed: np.ndarray,
    tokens: np.ndarray,
    place: int,
) -> str:
    """Return "lora", with the first wrong token and output, and the likely cause."""
    bad = np.argwhere(~(error <= allowed).reshape(len(error), math.prod(error.shape[1:])))
    if not bad.size:
        return f"lora, tokens of slot {place - 1}"
    row = int(bad[0, 0])
    is_base = (np.abs(wide[row] - base[row]) <= allowed[row]).all()
    cause = " (y without the adapter's product)" if is_base else ""
    return f"lora, token {tokens[row]} of slot {place - 1}, output {int(bad[0, 1])}{cause}"


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
