"""The compiled functions under the names by which programs call them."""

from __future__ import annotations

import ctypes
import functools

import jax

from enginebay_native.compiling import library


@functools.cache
def register(name: str) -> str:
    """Make src/{name}.cc known to XLA, once a process; the name to call it by. UnsupportedError
    without a compiler.
    """
    target = f"enginebay_{name}"
    function = getattr(ctypes.CDLL(str(library(name))), target)
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(function), platform="cpu")
    return target
