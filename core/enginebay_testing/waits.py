"""Detects calls that wait for the device, which means that they read an array on the host."""

from __future__ import annotations

import contextlib
import threading
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

METHODS = ("__array__", "__bool__", "__float__", "__index__", "__int__", "item", "tolist")
"""Methods of JAX arrays that wait for the value."""


@contextlib.contextmanager
def watching_for_waits() -> Iterator[list[str]]:
    """Within the block, append to the list each way in which this thread waits for JAX arrays.

    It detects conversions to NumPy and to Python numbers, jax.device_get and jax.block_until_ready.
    """
    found: list[str] = []
    mine = threading.get_ident()

    def spied(name: str, call: Callable[..., Any], *, always: bool) -> Callable[..., Any]:
        def spy(*args: Any, **kwargs: Any) -> Any:
            is_mine = threading.get_ident() == mine
            if is_mine and (always or any(isinstance(a, jax.Array) for a in args[:1])):
                found.append(name)
            return call(*args, **kwargs)

        return spy

    kind = type(jax.device_put(np.zeros(1)))
    with contextlib.ExitStack() as stack:
        for owner, name, always in (
            *((np, name, False) for name in ("asarray", "array")),
            *((jax, name, True) for name in ("device_get", "block_until_ready")),
            *((kind, name, False) for name in METHODS),
        ):
            spy = spied(name, getattr(owner, name), always=always)
            stack.enter_context(unittest.mock.patch.object(owner, name, spy))
        yield found
