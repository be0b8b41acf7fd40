"""Conformance suite of the platform contract."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from enginebay.platform import Platform
from enginebay.registry import Registry

Check = tuple[str, Callable[[], None]]


def platform_checks(platform: Platform, registry: Registry) -> list[Check]:
    """Every check of the suite, by name. Those that need a device pass without one only when why_not() says why."""
    checks = (devices_or_a_reason, defaults_are_served, facts_are_sound, options_compile)
    return [(check.__name__, lambda check=check: check(platform, registry)) for check in checks]  # type: ignore[misc]


def devices_or_a_reason(platform: Platform, registry: Registry) -> None:
    """Either there are devices, or a reason why there are none."""
    assert (platform.why_not() is None) == bool(platform.devices()), "why_not() and devices() disagree"


def defaults_are_served(platform: Platform, registry: Registry) -> None:
    """The default layout is registered, and some attention implementation serves it here in the default dtype."""
    assert platform.default_layout in registry.names("layout"), (
        f"layout {platform.default_layout!r} is not registered"
    )
    assert platform.default_dtype in ("float32", "bfloat16", "float16")
    able = []
    for entry in registry.entries:
        if (
            entry.kind != "kernel"
            or entry.op != "attention"
            or entry.state != "ready"
            or entry.declaration is None
        ):
            continue
        if entry.declaration.platforms and platform.name not in entry.declaration.platforms:
            continue
        caps = registry.load(entry).caps
        if (
            platform.name in caps.platforms
            and platform.default_layout in caps.layouts
            and platform.default_dtype in caps.q_dtypes
        ):
            able.append(entry.name)
    assert able, (
        f"no attention kernel serves layout {platform.default_layout} in {platform.default_dtype} on {platform.name}"
    )


def facts_are_sound(platform: Platform, registry: Registry) -> None:
    """Figures are positive, and the environment bears the platform's name."""
    for dtype in ("float32", "bfloat16", "float16"):
        assert platform.min_rows(dtype) >= 1
    if platform.why_not() is None:
        hardware = platform.hardware()
        assert hardware.bytes_per_s > 0
        assert hardware.memory_bytes > 0
        assert hardware.flops_per_s[platform.default_dtype] > 0
        assert platform.env().platform == platform.name


def options_compile(platform: Platform, registry: Registry) -> None:
    """XLA takes the compile options, and the program runs on the first device."""
    if platform.why_not() is not None:
        return
    x = jax.device_put(jnp.ones((4, 4)), platform.devices()[0])
    compiled = jax.jit(lambda a: a @ a).lower(x).compile(compiler_options=dict(platform.compile_options()))
    assert compiled(x)[0, 0] == 4
