"""The collectives all_reduce, all_gather and all_to_all: what a device's part of a call exchanges
with the other devices', inside shard_map. The references need nothing but lax.all_gather.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def all_reduce(x: jax.Array, *, axes: tuple[str, ...]) -> jax.Array:
    """The sum over devices; see AllReduceOp."""
    return jax.lax.psum(x, axes)


def all_gather(x: jax.Array, *, axes: tuple[str, ...], dim: int) -> jax.Array:
    """The devices' arrays one behind the other; see AllGatherOp."""
    return jax.lax.all_gather(x, axes, axis=dim, tiled=True)


def all_to_all(x: jax.Array, *, axes: tuple[str, ...]) -> jax.Array:
    """Each device's piece of every device's array; see AllToAllOp."""
    return jax.lax.all_to_all(x, axes, 0, 0, tiled=True)


def all_reduce_reference(x: jax.Array, *, axes: tuple[str, ...]) -> jax.Array:
    """The same by a sum of all arrays."""
    return jax.lax.all_gather(x, axes).sum(axis=0, dtype=x.dtype)


def all_gather_reference(x: jax.Array, *, axes: tuple[str, ...], dim: int) -> jax.Array:
    """The same, put together piece by piece."""
    return jnp.concatenate(list(jax.lax.all_gather(x, axes)), axis=dim)


def all_to_all_reference(x: jax.Array, *, axes: tuple[str, ...]) -> jax.Array:
    """The same, chosen from all pieces."""
    every = jax.lax.all_gather(x, axes)
    count = every.shape[0]
    pieces = every.reshape(count, count, x.shape[0] // count, *x.shape[1:])
    return pieces[:, jax.lax.axis_index(axes)].reshape(x.shape)
