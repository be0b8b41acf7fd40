"""Conformance suite of the platform contract."""

from __future__ import annotations

import functools
import os
import unittest

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from enginebay.contracts.platform import Platform
from enginebay.plugins.registry import Registry
from enginebay_testing.platform_kernels import kernel_checks
from enginebay_testing.verdicts import Check

MAX_CLAIMED = 1.5
"""Max share of the memory, as the device's allocator reports it, that a platform may claim."""


def platform_checks(platform: Platform, registry: Registry) -> list[Check]:
    """Return every check of the suite, by name. Checks that need a device are skipped without one,
    with the reason of why_not().
    """
    checks = (
        devices_or_a_reason,
        min_rows_are_positive,
        devices_are_there,
        facts_are_sound,
        memory_is_there,
        cache_arrays_are_zeros,
        options_compile,
    )
    first, *others = [
        (check.__name__, functools.partial(check, platform, registry)) for check in checks
    ]
    return [first, *kernel_checks(platform, registry), *others]


def _needs_device(platform: Platform) -> None:
    reason = platform.why_not()
    if reason is not None:
        raise unittest.SkipTest(reason)
    if not platform.devices():
        raise unittest.SkipTest("devices() is empty, as devices_or_a_reason says")


def devices_or_a_reason(platform: Platform, registry: Registry) -> None:
    """devices() returns devices, or why_not() gives a reason, never both."""
    reason, devices = platform.why_not(), platform.devices()
    assert (reason is None) == bool(devices), (
        f"why_not() returns {reason!r}, but devices() returns {len(devices)} devices; it returns a "
        "reason exactly when there is no device"
    )
    assert reason is None or reason.strip(), (
        "why_not() returns an empty text; it must say what is missing"
    )


def min_rows_are_positive(platform: Platform, registry: Registry) -> None:
    """min_rows and rows_at_once are positive, also without a device."""
    for dtype in ("float32", "bfloat16", "float16"):
        rows = platform.min_rows(dtype)
        assert isinstance(rows, int), f"min_rows({dtype!r}) is {rows!r}, expected a whole number"
        assert rows >= 1, f"min_rows({dtype!r}) is {rows}, expected at least 1"
    at_once = platform.rows_at_once
    assert at_once is None or at_once >= 1, f"rows_at_once is {at_once}, expected at least 1"


def devices_are_there(platform: Platform, registry: Registry) -> None:
    """devices() returns devices of this process, each once, in JAX's order, and env()
    matches them.
    """
    _needs_device(platform)
    devices = list(platform.devices())
    for device in devices:
        assert isinstance(device, jax.Device), f"{device!r} is not a jax.Device"
    local = jax.local_devices(backend=devices[0].platform)
    places = [local.index(device) for device in devices if device in local]
    assert len(places) == len(devices), f"{devices} are not all among the local devices {local}"
    assert places == sorted(set(places)), (
        f"devices {devices} are repeated, or not in JAX's order {local}"
    )
    kind = platform.env().device_kind
    # JAX has no name for the device kind of a host's processor.
    assert devices[0].platform == "cpu" or kind in ("", devices[0].device_kind), (
        f"env() names the device kind {kind!r}, but the first device has {devices[0].device_kind!r}"
    )


def facts_are_sound(platform: Platform, registry: Registry) -> None:
    """The figures of hardware() are positive, and env() has the platform's name."""
    _needs_device(platform)
    hardware = platform.hardware()
    for figure in ("bytes_per_s", "memory_bytes"):
        value = getattr(hardware, figure)
        assert value > 0, f"hardware().{figure} is {value}, expected more than 0"
    for dtype in {platform.default_dtype, "float32"}:
        rate = hardware.flops_per_s.get(dtype, 0.0)
        assert rate > 0, f"hardware() says {rate} operations per second in {dtype}"
    assert hardware.measured_on, "hardware().measured_on is empty"
    assert platform.env().platform == platform.name, (
        f"env() names the platform {platform.env().platform!r}, expected {platform.name!r}"
    )


def memory_is_there(platform: Platform, registry: Registry) -> None:
    """A device has the memory that the platform claims, as reported by the device or, for a CPU, by
    the host.
    """
    _needs_device(platform)
    claimed, device = platform.hardware().memory_bytes, platform.devices()[0]
    stats = device.memory_stats() or {}
    there = stats.get("bytes_limit")
    if there is None and device.platform == "cpu":
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if there is None:
        raise unittest.SkipTest("the device does not report its memory")
    # A platform's figure includes memory that the device reserves for itself; the allocator's does
    # not.
    assert claimed <= MAX_CLAIMED * there, f"{claimed} bytes are claimed, the device has {there}"


def cache_arrays_are_zeros(platform: Platform, registry: Registry) -> None:
    """zeros() returns zeros of the shape and dtype where they belong, which can be written; with
    demand_memory, clear() makes the named entries zeros again and leaves the others.
    """
    _needs_device(platform)
    where = SingleDeviceSharding(platform.devices()[0])
    for dtype in (jnp.dtype("float32"), jnp.dtype("bfloat16"), jnp.dtype("int8")):
        array = platform.zeros((5, 3, 4096), dtype, where)
        assert (array.shape, array.dtype) == ((5, 3, 4096), dtype), (
            f"zeros() returns {array.dtype}{list(array.shape)}, not {dtype}[5, 3, 4096]"
        )
        assert array.sharding == where, f"zeros() places an array by {array.sharding}, not {where}"
        assert not np.asarray(array).any(), f"zeros() returns {dtype} that is not 0"
        array = jax.jit(lambda a: a + 1, donate_argnums=0)(array)
        assert np.all(np.asarray(array) == 1), f"an array of zeros() in {dtype} is not written"
        if platform.demand_memory:
            platform.clear(jax.block_until_ready(array), 1, 3)
            left = np.asarray(array).astype(np.float32).max(axis=(1, 2)).tolist()
            assert left == [1, 0, 0, 1, 1], (
                f"after clear(array of ones, 1, 3) in {dtype} the entries have {left}, not 0 in "
                "entries 1 and 2 and 1 in the others"
            )


def options_compile(platform: Platform, registry: Registry) -> None:
    """XLA accepts the compile options, and the program runs on the first device."""
    _needs_device(platform)
    for dtype in {platform.default_dtype, "float32"}:
        x = jax.device_put(jnp.ones((4, 4), dtype), platform.devices()[0])
        lowered = jax.jit(lambda a: a @ a).lower(x)
        compiled = lowered.compile(compiler_options=dict(platform.compile_options()))
        assert compiled(x)[0, 0] == 4, f"a product in {dtype} is wrong"
