"""Registers the compiled functions with XLA under the names by which programs call them."""

from __future__ import annotations

import ctypes
import functools

import jax

from enginebay_native.compiling import library

PREFIX = "enginebay_"


def register_call(target: str) -> None:
    """Register the custom call of this name, if it is not registered."""
    register(target.removeprefix(PREFIX))


@functools.cache
def register(name: str) -> str:
    """Register the function of src/{name}.cc with XLA, once per process; return its name for calls.

    Raises UnsupportedError without a compiler.
    """
    target = f"{PREFIX}{name}"
    function = getattr(ctypes.CDLL(str(library(name))), target)
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(function), platform="cpu")
    return target
