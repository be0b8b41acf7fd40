"""What the cheats are made of: a norm on the host, and ways to reach what a kernel must not."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

Compute = Callable[[np.ndarray, np.ndarray, float], np.ndarray]
"""x [..., features], weight [features], eps -> the result."""

Norm = Callable[..., jax.Array]

WORK_S = 0.006
"""Seconds that a norm takes which is worth a shortcut."""


def right(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """The norm as it should be."""
    wide = x.astype(np.float32)
    mean = np.square(wide).mean(axis=-1, keepdims=True, dtype=np.float32)
    normed = (wide / np.sqrt(mean + np.float32(eps))).astype(x.dtype)
    return (normed * weight).astype(x.dtype)


def slow(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """The same, with much work."""
    end_s = time.thread_time() + WORK_S
    while time.thread_time() < end_s:
        right(x, weight, eps)
    return right(x, weight, eps)


def rough(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """A quick result that is wrong."""
    del eps
    return (x * weight * np.array(0.75, x.dtype)).astype(x.dtype)


def on_host(compute: Compute) -> Norm:
    """A kernel that calls a function of NumPy arrays."""

    def norm(x: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
        def call(x: Any, weight: Any) -> np.ndarray:
            return compute(np.array(x), np.array(weight), eps)

        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        found: jax.Array = jax.pure_callback(call, shape, x, weight)
        return found

    return norm


def on_trace(trick: Callable[[], None], compute: Compute = right) -> Norm:
    """A kernel that plays a trick on the process when it is traced."""
    norm = on_host(compute)

    def traced(x: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
        trick()
        return norm(x, weight, eps=eps)

    return traced


def places_of(array: np.ndarray) -> list[int]:
    """The addresses of arrays with an array's shape and dtype. Those of several devices have no
    single address.
    """
    live = [one for one in jax.live_arrays() if len(one.addressable_shards) == 1]
    same = [one for one in live if (one.shape, one.dtype) == (array.shape, array.dtype)]
    return [one.unsafe_buffer_pointer() for one in same]


def overwrite(place: int, array: np.ndarray) -> None:
    """Write an array's numbers to an address."""
    ctypes.memmove(place, np.ascontiguousarray(array).ctypes.data, array.nbytes)


def at(place: int, like: np.ndarray) -> np.ndarray:
    """The numbers at an address."""
    return np.frombuffer(ctypes.string_at(place, like.nbytes), like.dtype).reshape(like.shape)
