"""Faulty platforms: they claim devices, memory, kernels and options that are not there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from enginebay.ops.caps import Env
from enginebay.platform import Hardware, Platform
from enginebay.registry import load_registry
from enginebay_testing.platforms import platform_checks
from enginebay_xla.platforms import CpuPlatform

Check = tuple[str, Callable[[], None]]


class Absent(CpuPlatform):
    """Says that it can be used, and has no device."""

    def why_not(self) -> None:
        return None

    def devices(self) -> Sequence[jax.Device]:
        return ()


class Shy(CpuPlatform):
    """Has devices, and says that it cannot be used."""

    def why_not(self) -> str:
        return "no driver"


class Repeated(CpuPlatform):
    """Lists its first device twice."""

    def devices(self) -> Sequence[jax.Device]:
        return [*super().devices(), super().devices()[0]]


class Named(CpuPlatform):
    """Lists the names of its devices."""

    def devices(self) -> Any:
        return ["cpu:0"]


class Backwards(CpuPlatform):
    """Lists its devices from the last one on; where there is one alone, a device that it does not
    have.
    """

    def devices(self) -> Any:
        found = list(super().devices())[::-1]
        return found if len(found) > 1 else [*found, object()]


class Foreign(CpuPlatform):
    """Says that kernels run on another platform."""

    def env(self) -> Env:
        return Env("cuda", "sm_90", super().env().device_kind)


class Roomy(CpuPlatform):
    """Claims a hundred times the memory that there is."""

    def hardware(self) -> Hardware:
        found = super().hardware()
        return dataclasses.replace(found, memory_bytes=found.memory_bytes * 100)


class Idle(CpuPlatform):
    """Knows no rate of its default dtype."""

    def hardware(self) -> Hardware:
        return dataclasses.replace(super().hardware(), flops_per_s={})


class Slow(CpuPlatform):
    """Claims that its memory gives nothing."""

    def hardware(self) -> Hardware:
        return dataclasses.replace(super().hardware(), bytes_per_s=0.0)


class Unlaid(CpuPlatform):
    """Its default layout is not registered."""

    default_layout = "blocks"


class Unserved(CpuPlatform):
    """No attention kernel serves its default layout on it."""

    default_layout = "tpu_rpa"
    name = "npu"

    def env(self) -> Env:
        return Env("npu")


class Untyped(CpuPlatform):
    """Its default dtype is none that there is."""

    default_dtype = "float8"


class Rowless(CpuPlatform):
    """Its steps run at full speed with no rows."""

    def min_rows(self, dtype: str) -> int:
        return 0


class Optioned(CpuPlatform):
    """Has a compile option that XLA does not know."""

    def compile_options(self) -> Mapping[str, str | bool | int]:
        return {"xla_cpu_run_twice_as_fast": True}


FAULTS: dict[str, type[Platform]] = {
    kind.__name__: kind
    for kind in (
        *(Absent, Shy, Repeated, Named, Backwards, Foreign, Roomy),
        *(Idle, Slow, Unlaid, Unserved, Untyped, Rowless, Optioned),
    )
}

RIGHT: dict[str, type[Platform]] = {"cpu": CpuPlatform}


def checks(part: type[Platform]) -> list[Check]:
    """The kit's suite."""
    return platform_checks(part(), load_registry())
