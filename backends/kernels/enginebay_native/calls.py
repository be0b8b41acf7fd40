"""Registers the compiled functions with XLA under the names by which programs call them."""

from __future__ import annotations

import ctypes
import functools

import jax

from enginebay_native.compiling import begin_compiling, library

PREFIX = "enginebay_"
TOGETHER = (("attention", "linear"), ("quantized_linear", "panel_linear"))
"""Functions that most models need together: their libraries are compiled at the same time."""


def register_call(target: str) -> None:
    """Register the custom call of this name, if it is not registered."""
    register(target.removeprefix(PREFIX))


@functools.cache
def register(name: str) -> str:
    """Register the function of src/{name}.cc with XLA, once per process; return its name for calls.

    Raises UnsupportedError without a compiler.
    """
    target = f"{PREFIX}{name}"
    for names in TOGETHER:
        if name in names:
            begin_compiling(*(other for other in names if other != name))
    function = getattr(ctypes.CDLL(str(library(name))), target)
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(function), platform="cpu")
    return target
