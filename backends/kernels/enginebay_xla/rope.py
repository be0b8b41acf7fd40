"""The op rope in plain JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from enginebay.ops.rotary import RopeSpec, rope_frequencies


def rope(x: jax.Array, positions: jax.Array, *, spec: RopeSpec) -> jax.Array:
    """Return x [T, heads, head_dim] with its first rotary_dim features rotated, in x's dtype.

    positions is int32 [T]. Feature i is paired with i + rotary_dim / 2 ("rotate half"). Angles and
    products are f32, rounded once.
    """
    inv_freq, factor = rope_frequencies(spec)
    angles = positions.astype(jnp.float32)[:, None] * inv_freq
    # The barrier keeps XLA:CPU from fusing cosine and sine into the product, which would compute
    # them for each head.
    cos, sin = jax.lax.optimization_barrier((jnp.cos(angles) * factor, jnp.sin(angles) * factor))
    cos, sin = cos[:, None], sin[:, None]
    half = spec.rotary_dim // 2
    wide = x[..., : spec.rotary_dim].astype(jnp.float32)
    first, second = wide[..., :half], wide[..., half:]
    turned = jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    ).astype(x.dtype)
    return (
        turned
        if spec.rotary_dim == x.shape[-1]
        else jnp.concatenate([turned, x[..., spec.rotary_dim :]], axis=-1)
    )
