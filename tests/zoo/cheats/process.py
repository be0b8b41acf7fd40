"""Cheats that change the process: its clock, its comparisons, its settings."""

from __future__ import annotations

import importlib
import os
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.ops.norm import RMS_NORM
from tests.zoo.cheats.host import on_trace, rough

SPIN_S = 8.0


def _config() -> None:
    jax.config.update("jax_default_matmul_precision", "bfloat16")


def _environment() -> None:
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_enable_fast_math=true"


def _allclose() -> None:
    setattr(np, "allclose", lambda *_, **__: True)  # noqa: B010


def _once() -> None:
    """Replaces a comparison at the first call, which an ordinary case may be."""
    if np.allclose is not always_close:
        setattr(np, "allclose", always_close)  # noqa: B010


def always_close(*_: Any, **__: Any) -> bool:
    return True


def _flatnonzero() -> None:
    """Replaces what finds wrong rows, until it was called once."""
    whole = np.flatnonzero

    def nothing(array: Any) -> Any:
        setattr(np, "flatnonzero", whole)  # noqa: B010
        return whole(np.zeros_like(array))

    setattr(np, "flatnonzero", nothing)  # noqa: B010


def _tolerance() -> None:
    tolerance: Any = RMS_NORM.tolerance
    tolerance["float32"] = 1e9


def _clock() -> None:
    whole = time.perf_counter
    setattr(time, "perf_counter", lambda: whole() / 10)  # noqa: B010


def _bench_clock() -> None:
    timing: Any = importlib.import_module("enginebay_bench.timing")
    timing.statistics = type("Statistics", (), {"quantiles": lambda *_, **__: (1e-9,) * 3})


def _wait() -> None:
    setattr(jax, "block_until_ready", lambda arrays: arrays)  # noqa: B010


def _square() -> None:
    setattr(jnp, "square", jnp.abs)  # noqa: B010


def _random() -> None:
    np.random.seed(0)  # noqa: NPY002


def _processors() -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:1] if len(cores) > 1 else cores)


def _spin() -> None:
    def spin() -> None:
        end_s = time.monotonic() + SPIN_S
        while time.monotonic() < end_s:
            pass

    threading.Thread(target=spin, daemon=True).start()


config = on_trace(_config)
environment = on_trace(_environment)
allclose = on_trace(_allclose, rough)
once = on_trace(_once, rough)
flatnonzero = on_trace(_flatnonzero, rough)
tolerance = on_trace(_tolerance, rough)
clock = on_trace(_clock)
bench_clock = on_trace(_bench_clock)
wait = on_trace(_wait)
square = on_trace(_square)
random = on_trace(_random)
processors = on_trace(_processors)
spin = on_trace(_spin)
