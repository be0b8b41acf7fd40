"""The op rms_norm on TPUs: reads and writes each block of rows once."""

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
"""Bytes of a block in f32, in which it is computed. Several blocks fit the default VMEM limit of
every generation.
"""


@dataclasses.dataclass(frozen=True)
class PallasRmsNorm:
    """The op rms_norm; RmsNormOp describes it. It rounds where the reference does.

    TPUs have no float16: float16 rows are passed to the kernel as f32.
    """

    is_interpreted: bool = False

    def interpreted(self) -> PallasRmsNorm:
        """Return the same kernel, run by Pallas' TPU interpreter."""
        return dataclasses.replace(self, is_interpreted=True)

    def __call__(self, x: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
        """Return [..., features] in x's dtype, for x [..., features] and weight [features]."""
        if not x.size:
            return x
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
    # The product of two bf16 values is exact in f32, so this rounds once, as bf16 products do.
    out[...] = (normed.astype(jnp.float32) * weight[...].astype(jnp.float32)).astype(out.dtype)


rms_norm = PallasRmsNorm()
