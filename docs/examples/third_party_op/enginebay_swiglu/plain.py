"""The op swiglu in plain JAX: the reference."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def swiglu(x: jax.Array, gate: jax.Array, up: jax.Array) -> jax.Array:
    """Compute the op; SwigluOp describes it."""
    opened, product = (
        jnp.einsum("ti,oi->to", x, weight, preferred_element_type=jnp.float32).astype(x.dtype)
        for weight in (gate, up)
    )
    return jax.nn.silu(opened.astype(jnp.float32)).astype(x.dtype) * product
