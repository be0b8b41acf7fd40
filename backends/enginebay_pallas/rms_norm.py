"""The op rms_norm on TPUs: a block of rows at a time, read and written once."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from enginebay_pallas.generations import MIB, round_up, sublanes
from enginebay_pallas.interpret import interpreting

BLOCK_BYTES = MIB
"""Of a block in f32, which it is computed in. Several such fit every generation's default share of
VMEM.
"""


@dataclasses.dataclass(frozen=True)
class PallasRmsNorm:
    """By the contract of enginebay_xla.ops.RmsNormOp; rounds where the reference does.

    TPUs have no float16: such rows go in and out as f32.
    """

    is_interpreted: bool = False

    def interpreted(self) -> PallasRmsNorm:
        """The same kernel by Pallas' TPU interpreter."""
        return dataclasses.replace(self, is_interpreted=True)

    def __call__(self, x: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
        """x [..., features], weight [features] -> [..., features] in x's dtype."""
        dtype = jnp.float32 if x.dtype == jnp.float16 else x.dtype
        rows = x.reshape(-1, x.shape[-1]).astype(dtype)
        run = interpreting(_norm) if self.is_interpreted else _norm
        return run(rows, weight.astype(dtype)[None], eps).reshape(x.shape).astype(x.dtype)


def _norm(rows: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    num_rows, width = rows.shape
    tile = sublanes(str(rows.dtype))
    block_rows = min(max(BLOCK_BYTES // (4 * width) // tile, 1) * tile, round_up(num_rows, tile))
    padded = jnp.pad(rows, ((0, -num_rows % tile), (0, 0)))
    block = pl.BlockSpec((block_rows, width), lambda i: (i, 0))
    normed = pl.pallas_call(
        functools.partial(_kernel, eps=eps),
        out_shape=jax.ShapeDtypeStruct(padded.shape, padded.dtype),
        grid=(pl.cdiv(padded.shape[0], block_rows),),
        in_specs=[block, pl.BlockSpec((1, width), lambda _: (0, 0))],
        out_specs=block,
        name="rms_norm",
    )(padded, weight)
    return normed[:num_rows]


def _kernel(rows: Any, weight: Any, out: Any, *, eps: float) -> None:
    wide = rows[...].astype(jnp.float32)
    variance = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    normed = (wide * jax.lax.rsqrt(variance + eps)).astype(out.dtype)
    # A product of two bf16 is exact in f32, so this rounds as often as a product in bf16 does.
    out[...] = (normed.astype(jnp.float32) * weight[...].astype(jnp.float32)).astype(out.dtype)


rms_norm = PallasRmsNorm()
