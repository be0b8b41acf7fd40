"""Conformance suite of the platform contract."""

from __future__ import annotations

import unittest
from collections.abc import Callable

import jax
import jax.numpy as jnp

from enginebay.platform import Platform
from enginebay.registry import Entry, Registry

Check = tuple[str, Callable[[], None]]


def platform_checks(platform: Platform, registry: Registry) -> list[Check]:
    """Every check of the suite, by name. Those that need a device are skipped without one, with why_not()'s reason."""
    checks = (
        devices_or_a_reason,
        defaults_are_served,
        min_rows_are_positive,
        facts_are_sound,
        options_compile,
    )
    return [(check.__name__, lambda check=check: check(platform, registry)) for check in checks]  # type: ignore[misc]


def _needs_device(platform: Platform) -> None:
    reason = platform.why_not()
    if reason is not None:
        raise unittest.SkipTest(reason)


def devices_or_a_reason(platform: Platform, registry: Registry) -> None:
    """Either there are devices, or a reason why there are none."""
    assert (platform.why_not() is None) == bool(platform.devices()), "why_not() and devices() disagree"


def defaults_are_served(platform: Platform, registry: Registry) -> None:
    """The default layout is registered, and every op has an implementation that runs here with the defaults."""
    assert platform.default_layout in registry.names("layout"), (
        f"layout {platform.default_layout!r} is not registered"
    )
    assert platform.default_dtype in ("float32", "bfloat16", "float16")
    kernels = [e for e in registry.entries if e.kind == "kernel" and e.state == "ready"]
    assert any(e.op == "attention" for e in kernels), "no attention kernel is registered"
    for op in sorted({e.op for e in kernels}):
        able = [e.name for e in kernels if e.op == op and _serves_defaults(platform, registry, e)]
        assert able, (
            f"no {op} kernel serves layout {platform.default_layout} in {platform.default_dtype} on {platform.name}"
        )


def _serves_defaults(platform: Platform, registry: Registry, entry: Entry) -> bool:
    """By its declaration; attention kernels say more in their capabilities."""
    if entry.declaration is None:
        return False
    if entry.declaration.platforms and platform.name not in entry.declaration.platforms:
        return False
    if entry.op != "attention":
        return True
    caps = registry.load(entry).caps
    return (
        platform.name in caps.platforms
        and platform.default_layout in caps.layouts
        and platform.default_dtype in caps.q_dtypes & caps.kv_dtypes
    )


def min_rows_are_positive(platform: Platform, registry: Registry) -> None:
    """Without a device too."""
    for dtype in ("float32", "bfloat16", "float16"):
        assert platform.min_rows(dtype) >= 1


def facts_are_sound(platform: Platform, registry: Registry) -> None:
    """Figures are positive, and the environment bears the platform's name."""
    _needs_device(platform)
    hardware = platform.hardware()
    assert hardware.bytes_per_s > 0
    assert hardware.memory_bytes > 0
    assert hardware.flops_per_s[platform.default_dtype] > 0
    assert platform.env().platform == platform.name


def options_compile(platform: Platform, registry: Registry) -> None:
    """XLA takes the compile options, and the program runs on the first device."""
    _needs_device(platform)
    x = jax.device_put(jnp.ones((4, 4)), platform.devices()[0])
    compiled = jax.jit(lambda a: a @ a).lower(x).compile(compiler_options=dict(platform.compile_options()))
    assert compiled(x)[0, 0] == 4
