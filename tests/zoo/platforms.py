"""Faulty platforms: they claim devices, memory and options that are not there, or lack kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from enginebay.contracts.platform import Hardware, Platform
from enginebay.ops.caps import Env
from enginebay.plugins.hooks import Declaration
from enginebay_testing.platforms import platform_checks
from enginebay_xla.platforms import CpuPlatform
from tests.zoo import platform_registries as registries

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


class Npu(CpuPlatform):
    """The platform of another distribution."""

    name = "npu"
    default_dtype = "float32"

    def env(self) -> Env:
        return Env("npu", "npu_1")


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


@dataclasses.dataclass(frozen=True)
class Part:
    """A platform, and the kernels and ops that are registered for it."""

    kind: type[Platform]
    change: registries.Change = registries.unchanged
    more: tuple[Declaration, ...] = ()


KERNELS: dict[str, Part] = {
    "no linear": Part(Npu, registries.without("linear")),
    "no embedding": Part(Npu, registries.without("embedding")),
    "no rms_norm, but a fused one": Part(Npu, registries.without("rms_norm")),
    "no rope and no kv_write, but a fused one": Part(Npu, registries.without("rope", "kv_write")),
    "no sample": Part(Npu, registries.without("sample")),
    "no attention": Part(Npu, registries.without("attention")),
    "linear for another platform": Part(Npu, registries.for_platform("linear", "tpu")),
    "attention declared for another platform": Part(Npu, registries.for_platform("attention", "x")),
    "Caps for another platform": Part(Npu, registries.with_attention("OTHER_PLATFORM")),
    "attention for another layout": Part(Npu, registries.with_attention("OTHER_LAYOUT")),
    "attention for another dtype": Part(Npu, registries.with_attention("OTHER_DTYPE")),
    "attention for another device": Part(Npu, registries.with_attention("OTHER_ARCH")),
    "no attention of prefills": Part(Npu, registries.with_attention("NO_PREFILL")),
    "no attention of mixed steps": Part(Npu, registries.with_attention("NO_MIXED")),
    "kv_write for another layout": Part(Npu, registries.with_layouts("kv_write", "nhd")),
    "no kernel at all": Part(Npu, lambda _: None),
}
"""Faulty kernels of a right platform."""

FAULTS: dict[str, Part] = {
    kind.__name__: Part(kind)
    for kind in (
        *(Absent, Shy, Repeated, Named, Backwards, Foreign, Roomy),
        *(Idle, Slow, Unlaid, Untyped, Rowless, Optioned),
    )
} | KERNELS

FUSED = ("add_rms_norm", "rope_kv_write")

RIGHT: dict[str, Part] = {
    "cpu": Part(CpuPlatform),
    "npu": Part(Npu),
    "an op of a plugin without a kernel": Part(Npu, more=registries.EXTERNAL_OP),
    "no fused kernels": Part(Npu, registries.without(*FUSED)),
    "plain weights and caches alone": Part(Npu, registries.without_capabilities),
    "plain caches alone": Part(Npu, registries.with_attention("PLAIN_CACHE")),
}


def checks(part: Part) -> list[Check]:
    """The kit's suite."""
    return platform_checks(part.kind(), registries.registry_of(part.change, part.more))
