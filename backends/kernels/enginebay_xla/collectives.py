"""The collectives all_reduce, all_gather and all_to_all, which devices call inside shard_map to
exchange results. The references use lax.all_gather only.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def all_reduce(x: jax.Array, *, axes: tuple[str, ...]) -> jax.Array:
    """Return the sum over devices; AllReduceOp describes it."""
    return jax.lax.psum(x, axes)


def all_gather(x: jax.Array, *, axes: tuple[str, ...], dim: int) -> jax.Array:
    """Concatenate the arrays of all devices; AllGatherOp describes it."""
    return jax.lax.all_gather(x, axes, axis=dim, tiled=True)


def all_to_all(x: jax.Array, *, axes: tuple[str, ...]) -> jax.Array:
    """Send one piece of x to each device; AllToAllOp describes it."""
    return jax.lax.all_to_all(x, axes, 0, 0, tiled=True)


def all_reduce_reference(x: jax.Array, *, axes: tuple[str, ...]) -> jax.Array:
    """Gather all arrays and return their sum."""
    return jax.lax.all_gather(x, axes).sum(axis=0, dtype=x.dtype)


def all_gather_reference(x: jax.Array, *, axes: tuple[str, ...], dim: int) -> jax.Array:
    """Gather all arrays and concatenate them."""
    return jnp.concatenate(list(jax.lax.all_gather(x, axes)), axis=dim)


def all_to_all_reference(x: jax.Array, *, axes: tuple[str, ...]) -> jax.Array:
    """Gather all pieces and return those for this device."""
    every = jax.lax.all_gather(x, axes)
    count = every.shape[0]
    pieces = every.reshape(count, count, x.shape[0] // count, *x.shape[1:])
    return pieces[:, jax.lax.axis_index(axes)].reshape(x.shape)
