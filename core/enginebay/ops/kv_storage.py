"""How quantised caches store keys and values: the arithmetic that all layouts and kernels share.

A head of a token, x [head_dim], is stored on its own. `scale` is bfloat16, `zero` int16.

- int8: value = code * scale, codes -127 to 127, scale = max|x| / 127.
- uint4: value = (code - zero) * scale, codes 0 to 15, scale = (max x - min x) / 15 and
  zero = -round(min x / scale). The smallest values always have code 0, the largest code 15. Where
  |zero| would be above MAX_ZERO, because the values of the head are almost equal, all codes are 0,
  scale = max|x| and zero = -1, or 1 for negative values.
- fp8: value = code * scale, codes in float8_e4m3fn, scale = max|x| / 448. Arrays hold the bits of
  codes as uint8: XLA on a CPU converts a whole array of float8 in order to move a part of it.

Every product is exact in f32: a scale has 8 significant bits, and the other factor at most 15. To
quantise read values again gives the same bytes, because the largest code is always reached: the
scale is found again as the quotient of an exact product, and rounding to 8 bits hides the last bits
of a quotient. So implementations may divide with a relative error of up to 2**-17.

Where a scale would be below MIN_SCALE, scale and codes are 0 (uint4 then has zero = -1), so that no
product is a subnormal number. A head with a value that is not finite, or not below MAX_VALUE, has
the scale NaN and codes of 0, and reads as NaN.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

KVStorage = Literal["int8", "uint4", "fp8"]

KV_STORAGES: frozenset[str] = frozenset(get_args(KVStorage))

FP8 = jnp.dtype(jnp.float8_e4m3fn)
BYTES = jnp.dtype(jnp.uint8)
VALUE_DTYPES = {"int8": jnp.dtype(jnp.int8), "uint4": BYTES, "fp8": BYTES}
"""Dtype of the arrays of codes. A byte holds two uint4, or the bits of a float8."""

SCALE_DTYPE, ZERO_DTYPE = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.int16)
MAX_INT8, MAX_UINT4, MAX_FP8 = 127, 15, 448
MIN_SCALE, MAX_VALUE = 2.0**-100, 2.0**120
MAX_ZERO = 32000
"""Largest magnitude of a zero point: |code - zero| has at most 15 bits."""

TOLERANCES = {"int8": 0.004, "uint4": 0.075, "fp8": 0.037}
"""Max difference between a written and a read value, as a share of the largest magnitude in its
head. int8: 0.5 / 127. uint4: 0.56 / 15 of the range, which is at most twice the largest magnitude.
fp8: half of the distance of its largest values, 16 / 448. All plus the rounding of the scale.
"""


class QuantizedHeads(NamedTuple):
    """Codes [..., head_dim] with scales [...] and, for uint4, zero points [...]. Codes of uint4 are
    not packed. Bytes without zero points are the bits of float8.
    """

    codes: jax.Array
    scales: jax.Array
    zeros: jax.Array | None = None

    def values(self) -> jax.Array:
        """Return the values [..., head_dim] in f32, without loss."""
        codes = self.codes
        if codes.dtype == BYTES and self.zeros is None:
            codes = jax.lax.bitcast_convert_type(codes, FP8)
        wide = codes.astype(jnp.float32)
        if self.zeros is not None:
            wide = wide - self.zeros.astype(jnp.float32)[..., None]
        return wide * self.scales.astype(jnp.float32)[..., None]


def quantize_int8(x: jax.Array) -> QuantizedHeads:
    """Quantise x [..., head_dim]."""
    scaled, scales = _symmetric(x, MAX_INT8)
    return QuantizedHeads(jnp.rint(scaled).astype(jnp.int8), scales)


def quantize_fp8(x: jax.Array) -> QuantizedHeads:
    """Quantise x [..., head_dim]."""
    scaled, scales = _symmetric(x, MAX_FP8)
    return QuantizedHeads(jax.lax.bitcast_convert_type(scaled.astype(FP8), BYTES), scales)


def quantize_uint4(x: jax.Array) -> QuantizedHeads:
    """Quantise x [..., head_dim]; the codes are uint8 0 to 15."""
    x = x.astype(jnp.float32)
    low, high = x.min(axis=-1), x.max(axis=-1)
    scales = _rounded((high - low) / MAX_UINT4)
    zeros = -jnp.rint(low / _divisor(scales))
    equal = (scales < MIN_SCALE) | ~(jnp.abs(zeros) <= MAX_ZERO)
    # Values that differ by less than 15 * MIN_SCALE are almost equal only where they are larger.
    constant = _rounded(jnp.maximum(jnp.abs(low), jnp.abs(high)))
    constant = jnp.where(constant < 1024 * MIN_SCALE, 0, constant)
    scales = jnp.where(equal, constant, scales)
    zeros = jnp.where(equal, jnp.where((high + low < 0) & (constant > 0), 1, -1), zeros)
    codes = (jnp.rint(x / _divisor(scales)[..., None]) + zeros[..., None]).clip(0, MAX_UINT4)
    codes = jnp.where(x == low[..., None], 0, jnp.where(x == high[..., None], MAX_UINT4, codes))
    largest = jnp.maximum(jnp.abs(zeros), MAX_UINT4 - zeros) * scales
    good = (largest < MAX_VALUE) & _finite(x)
    codes = jnp.where((good & ~equal)[..., None], codes, 0)
    return QuantizedHeads(
        codes.astype(jnp.uint8),
        jnp.where(good, scales, jnp.nan).astype(SCALE_DTYPE),
        jnp.where(good, zeros, -1).astype(ZERO_DTYPE),
    )


QUANTIZE = {"int8": quantize_int8, "uint4": quantize_uint4, "fp8": quantize_fp8}


def _symmetric(x: jax.Array, largest_code: int) -> tuple[jax.Array, jax.Array]:
    """Return f32 x / scales, within the largest code, and the scales of x [..., head_dim]."""
    x = x.astype(jnp.float32)
    scales = _rounded(jnp.abs(x).max(axis=-1) / largest_code)
    scales = jnp.where(scales < MIN_SCALE, 0, scales)
    good = (scales * largest_code < MAX_VALUE) & _finite(x)
    scaled = (x / _divisor(scales)[..., None]).clip(-largest_code, largest_code)
    scaled = jnp.where((good & (scales > 0))[..., None], scaled, 0)
    return scaled, jnp.where(good, scales, jnp.nan).astype(SCALE_DTYPE)


def _finite(x: jax.Array) -> jax.Array:
    """Return which heads [..., head_dim] have finite values only. A maximum may ignore NaN."""
    return jnp.isfinite(x).all(axis=-1)


def _divisor(scales: jax.Array) -> jax.Array:
    """Return scales with 1 in place of 0."""
    return jnp.where(scales == 0, 1, scales)


def _rounded(x: jax.Array) -> jax.Array:
    """Return f32 x rounded to 8 significant bits, as f32. A conversion there and back could be
    left out by the compiler.
    """
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def narrowed(values: jax.Array, dtype: Any) -> jax.Array:
    """Return f32 values in `dtype`. A value that rounding of the scale put beyond the largest one
    of float16 becomes that.
    """
    if jnp.dtype(dtype) == jnp.float16:
        values = values.clip(float(jnp.finfo(jnp.float16).min), float(jnp.finfo(jnp.float16).max))
    return values.astype(dtype)


def pack_nibbles(low: jax.Array, high: jax.Array) -> jax.Array:
    """Return bytes whose low and high four bits are two arrays of uint8 codes 0 to 15."""
    return low | (high << 4)


def unpack_nibbles(packed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the codes in the low and in the high four bits, as uint8."""
    return packed & 15, packed >> 4


def pack_halves(codes: jax.Array) -> jax.Array:
    """Return bytes [..., ceil(head_dim / 2)] with code i in the low four bits of byte i and code
    i + ceil(head_dim / 2) in its high four bits.
    """
    half = -(-codes.shape[-1] // 2)
    missing = [(0, 0)] * (codes.ndim - 1) + [(0, 2 * half - codes.shape[-1])]
    codes = jnp.pad(codes, missing)
    return pack_nibbles(codes[..., :half], codes[..., half:])


def unpack_halves(packed: jax.Array, head_dim: int) -> jax.Array:
    """Return the codes [..., head_dim] that pack_halves packed."""
    return jnp.concatenate(unpack_nibbles(packed), axis=-1)[..., :head_dim]
