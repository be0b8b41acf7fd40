"""RMS norms that are right in 16 bits and go wrong in f32, each in its own way."""

from __future__ import annotations

import ctypes
import os

import jax
import jax.numpy as jnp

from enginebay.errors import UnsupportedError


def right(x: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale * weight.astype(jnp.float32)).astype(x.dtype)


def wrong(x: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
    return right(x, weight, eps=eps) * (1.01 if x.dtype == jnp.float32 else 1)


def not_a_number(x: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
    return right(x, weight, eps=eps) * (jnp.nan if x.dtype == jnp.float32 else 1)


def raises(x: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
    if x.dtype == jnp.float32:
        raise RuntimeError("the planted exception")
    return right(x, weight, eps=eps)


def asserts(x: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
    assert x.dtype != jnp.float32, "an assertion of the kernel itself"
    return right(x, weight, eps=eps)


def exits(x: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
    if x.dtype == jnp.float32:
        os._exit(0)
    return right(x, weight, eps=eps)


def crashes(x: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
    if x.dtype == jnp.float32:
        ctypes.string_at(0)
    return right(x, weight, eps=eps)


def hangs(x: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
    if x.dtype == jnp.float32:
        while True:
            ctypes.PyDLL(
                None
            ).pause()  # in C, with the interpreter's lock: no signal handler of Python ever runs
    return right(x, weight, eps=eps)


def declines(x: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
    if x.dtype == jnp.float32:
        raise UnsupportedError("it has no f32 form")
    return right(x, weight, eps=eps)
