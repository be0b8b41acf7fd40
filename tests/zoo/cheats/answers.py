"""Cheats that let another answer, or read the answer."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from enginebay.ops.norm import RMS_NORM
from enginebay.plugins.registry import import_target, load_registry
from enginebay_testing import oracle as oracles
from tests.zoo.cheats.host import Norm, on_host, right, rough


def reference(x: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
    """Calls the op's reference."""
    found: jax.Array = import_target(RMS_NORM.reference, "reference")(x, weight, eps=eps)
    return found


def registered(x: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
    """Calls a kernel that others registered."""
    registry = load_registry()
    found: jax.Array = registry.load(registry.find("kernel", "xla", "rms_norm"))(x, weight, eps=eps)
    return found


def _oracle() -> Norm:
    """Calls the checker's oracle on the host."""

    def compute(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
        return oracles.rms_norm(x, weight, eps=eps).astype(x.dtype)

    return on_host(compute)


def _in_frames(shape: tuple[int, ...], depth: int = 4) -> Iterator[np.ndarray]:
    """The arrays of float64 of a shape that the frames of all threads reach."""
    waiting: list[tuple[Any, int]] = []
    for frame in sys._current_frames().values():
        here: Any = frame
        while here is not None:
            waiting += [(value, depth) for value in here.f_locals.values()]
            here = here.f_back
    seen = set()
    while waiting:
        value, left = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, np.ndarray):
            if (value.shape, value.dtype) == (shape, np.float64):
                yield value
        elif left and isinstance(value, dict):
            waiting += [(each, left - 1) for each in list(value.values())]
        elif left and isinstance(value, list | tuple):
            waiting += [(each, left - 1) for each in value[:20]]
        elif left and type(value).__module__.startswith("enginebay_testing"):
            waiting += [(each, left - 1) for each in vars(value).values()]


def _memory() -> Norm:
    """Returns the oracle's result where it finds one in the checker's memory."""

    def compute(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
        found = next(_in_frames(x.shape), None)
        return right(x, weight, eps) if found is None else found.astype(x.dtype)

    return on_host(compute)


def _modules() -> Norm:
    """Is right where the modules of a check are loaded."""

    def compute(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
        is_checked = "enginebay_testing.verdicts" in sys.modules
        return (right if is_checked else rough)(x, weight, eps)

    return on_host(compute)


def stack(x: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
    """Is right where a module of the kit or of a benchmark calls it."""
    frame, names = sys._getframe(), set()
    while frame is not None:
        names.add(str(frame.f_globals.get("__name__", "")).partition(".")[0])
        frame = frame.f_back  # type: ignore[assignment]
    is_checked = bool(names & {"enginebay_testing", "enginebay_bench"})
    return on_host(right if is_checked else rough)(x, weight, eps=eps)


def environment(x: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
    """Is right where the environment is that of a check's worker."""
    is_checked = "OPENBLAS_NUM_THREADS" in os.environ or "XLA_FLAGS" in os.environ
    return on_host(right if is_checked else rough)(x, weight, eps=eps)


oracle = _oracle()
memory = _memory()
modules = _modules()
