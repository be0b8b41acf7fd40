"""The ops rms_norm and add_rms_norm in plain JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from enginebay.ops.norm import AddRmsNormOp, RmsNormOp


def rms_norm(x: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
    """Return x [..., features] / rms(x) * weight [features] in x's dtype.

    It rounds where Hugging Face's LlamaRMSNorm does: statistics and division in f32, a cast to x's
    dtype, then the product with the weight.
    """
    wide = x.astype(jnp.float32)
    variance = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    normed = (wide * jax.lax.rsqrt(variance + eps)).astype(x.dtype)
    return (normed * weight).astype(x.dtype)


def _rounded(total: jax.Array) -> jax.Array:
    """Return a sum that is rounded to its dtype. Without this, XLA computes a sum of narrow numbers
    in f32, and passes it unrounded to the operations that it fuses with the sum.
    """
    if total.dtype == jnp.float32:
        return total
    numbers = jnp.finfo(total.dtype)
    return jax.lax.reduce_precision(total, numbers.nexp, numbers.nmant)


def composed_add_rms_norm(rms_norm: RmsNormOp) -> AddRmsNormOp:
    """Return the op add_rms_norm made of a sum, rounded to x's dtype, and an op rms_norm."""

    def add_rms_norm(
        x: jax.Array, residual: jax.Array, weight: jax.Array, *, eps: float
    ) -> tuple[jax.Array, jax.Array]:
        total = _rounded(x + residual)
        return rms_norm(total, weight, eps=eps), total

    return add_rms_norm


add_rms_norm = composed_add_rms_norm(rms_norm)
