"""Keys and values that the kit writes to a cache: heads of special values, and none that a
quantised cache may round either way.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from enginebay_testing.op_kit import PlainCase

KINDS = 9
"""How many kinds of heads `new_heads` makes; the last three are usual ones."""

FREE_SHARE = 2.0**-14
"""Quotients this close to the middle of two results may be rounded to either, because an
implementation may divide with a relative error of 2**-17.
"""

LARGEST_CODES = {"int8": 127, "fp8": 448, "uint4": 15}


def new_heads(case: PlainCase, shape: tuple[int, int, int], part: int) -> np.ndarray:
    """Return keys (part 0) or values (part 1) [tokens, heads, head_dim]. Among usual heads there
    are heads of zeros, with one outlier, of equal, subnormal, large, and only negative numbers.
    """
    rng = np.random.default_rng([case.seed, 11, part])
    x = rng.normal(size=shape)
    tokens, heads, _ = shape
    kinds = np.arange(tokens * heads).reshape(tokens, heads) + 2 * case.seed + 3 * part
    kinds %= KINDS
    numbers = jnp.finfo(case.dtype)
    x[kinds == 0] = 0.0
    x[kinds == 1, rng.integers(0, shape[2])] = 300.0
    x[kinds == 2] = -1.5 if case.seed else 1.5
    if case.row["storage"]:  # without one, a program may write subnormal numbers as zeros
        x[kinds == 3] *= float(numbers.smallest_subnormal) * 8
    x[kinds == 4] *= 5000.0 if case.dtype == np.float16 else 1e30
    x[kinds == 5] = -0.1 * np.abs(x[kinds == 5]) - 20.0  # far from zero in steps of a storage
    storage = case.row["storage"]
    return x.astype(case.dtype) if storage is None else rounded_one_way(x, str(storage), case.dtype)


def rounded_one_way(x: np.ndarray, storage: str, dtype: np.dtype) -> np.ndarray:
    """Return heads x [..., head_dim] in `dtype`, changed a little where scales, zero points or
    codes of a storage could be rounded either way.
    """
    x = x.astype(dtype)
    for _ in range(12):
        free = _free_heads(x.astype(np.float64), storage)
        if not free.any():
            break
        x[free] = (x[free].astype(np.float64) * 1.07).astype(dtype)
    wide = x.astype(np.float64)
    scales, low = _scales(wide, storage)
    shares = np.abs(wide / np.where(scales == 0, 1, scales)[..., None])
    steps = np.ones_like(shares)
    if storage == "fp8":  # three bits after the first one, from 2**-6 on
        steps = np.exp2(np.floor(np.log2(np.maximum(shares, 2.0**-6))) - 3)
    either = _in_the_middle(shares / steps, FREE_SHARE * np.maximum(shares / steps, 1.0))
    instead = low[..., None] if storage == "uint4" else np.zeros_like(low)[..., None]
    return np.where(either, instead, wide).astype(dtype)


def _scales(x: np.ndarray, storage: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the scales of heads, rounded to 8 bits, and their smallest numbers."""
    low, high = x.min(axis=-1), x.max(axis=-1)
    spread = high - low if storage == "uint4" else np.abs(x).max(axis=-1)
    exact = (spread / LARGEST_CODES[storage]).astype(np.float32)
    return exact.astype(jnp.bfloat16).astype(np.float64), low


def _free_heads(x: np.ndarray, storage: str) -> np.ndarray:
    low, high = x.min(axis=-1), x.max(axis=-1)
    largest = np.abs(x).max(axis=-1)
    spread = high - low if storage == "uint4" else largest
    mantissas = 256 * np.frexp(spread / LARGEST_CODES[storage])[0]
    free = _in_the_middle(mantissas, 256 * FREE_SHARE)
    if storage == "uint4":
        scales, _ = _scales(x, storage)
        zeros = np.abs(low / np.where(scales == 0, 1, scales))
        free |= (scales > 0) & _in_the_middle(zeros, FREE_SHARE * np.maximum(zeros, 1.0))
    return np.asarray(free & (largest > 0) & (low < high))


def _in_the_middle(x: np.ndarray, allowed: np.ndarray | float) -> np.ndarray:
    return np.asarray(np.abs(x - np.floor(x) - 0.5) <= allowed)
