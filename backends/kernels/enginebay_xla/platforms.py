"""The platforms that JAX supports without a plugin: cpu, cuda and tpu."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import jax
import numpy as np
from jax.sharding import Sharding

from enginebay.contracts.platform import Compiled, Hardware, Platform
from enginebay.ops.caps import Env
from enginebay_xla import demand_memory

GIB = 1 << 30

TPU_ARCHS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5": "v5p",
    "TPU v6 lite": "v6e",
    "TPU7x": "7x",
}
"""Short names (v5e) of the device kinds of TPUs in JAX."""


def _devices(backend: str) -> list[jax.Device]:
    """Return the local devices of a JAX backend, or none where the backend is missing."""
    try:
        return list(jax.local_devices(backend=backend))
    except RuntimeError:  # JAX raises it for a backend that is not installed or has no device
        return []


def _device_memory(device: jax.Device, otherwise: int) -> int:
    """Return the bytes that JAX may allocate on a device."""
    stats = device.memory_stats()
    return int(stats["bytes_limit"]) if stats and "bytes_limit" in stats else otherwise


@functools.cache
def _processor() -> str:
    """Return the model and the number of cores of the host's processor; "cpu" outside of Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "cpu"
    first = {
        name.strip(): value.strip()
        for name, _, value in (line.partition(":") for line in lines[::-1])
    }
    known = [first[n] for n in ("model name", "CPU part") if n in first]
    known += [
        f"{n} {first[key]}"
        for n, key in (("family", "cpu family"), ("model", "model"))
        if key in first
    ]
    return ", ".join([*known, f"{os.cpu_count()} cores"]) if known else "cpu"


class JaxPlatform(Platform):
    """A platform whose devices JAX lists under `backend`."""

    backend: ClassVar[str]
    hint: ClassVar[str]

    def devices(self) -> Sequence[jax.Device]:
        return _devices(self.backend)

    def why_not(self) -> str | None:
        return None if self.devices() else f"JAX finds no {self.backend} device; {self.hint}"

    def compile_options(self) -> Mapping[str, str | bool | int]:
        return {}

    def min_rows(self, dtype: str) -> int:
        return 1


class CpuPlatform(JaxPlatform):
    """The host's processors.

    The layout keeps the keys of a head together, and a single row of a 16-bit dtype is padded;
    docs/performance.md says why.
    """

    name = "cpu"
    default_layout = "hnd"
    default_dtype = "float32"
    rows_at_once = 4
    one_prefill_width = True
    runtime_bytes = 384 * 2**20
    demand_memory = demand_memory.IS_AVAILABLE
    backend = "cpu"
    hint = "is JAX_PLATFORMS set to something else?"

    def env(self) -> Env:
        return Env("cpu", "", _processor())

    def hardware(self) -> Hardware:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Hardware(
            52e9,
            {"float32": 482e9, "bfloat16": 400e9, "float16": 100e9},
            memory,
            "2 cores with AVX-512 and BF16",
        )

    def min_rows(self, dtype: str) -> int:
        return 1 if dtype == "float32" else 2

    def zeros(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype,
        sharding: Sharding,
        compiled: Compiled | None = None,
    ) -> jax.Array:
        if self.demand_memory:
            return demand_memory.make_zeros(shape, dtype, sharding, compiled)
        return super().zeros(shape, dtype, sharding, compiled)

    def clear(self, array: jax.Array, first: int, last: int) -> None:
        demand_memory.clear(array, first, last)


class CudaPlatform(JaxPlatform):
    """NVIDIA GPUs."""

    name = "cuda"
    default_layout = "nhd"
    default_dtype = "bfloat16"
    priority = 10
    mixed_steps = True
    backend = "cuda"
    hint = "install enginebay[gpu] and check the driver"

    def env(self) -> Env:
        device = self.devices()[0]
        capability = str(getattr(device, "compute_capability", ""))
        return Env(
            "cuda", f"sm_{capability.replace('.', '')}" if capability else "", device.device_kind
        )

    def hardware(self) -> Hardware:
        memory = _device_memory(self.devices()[0], 80 * GIB)
        return Hardware(
            4.3e12, {"float32": 50e12, "bfloat16": 790e12, "float16": 790e12}, memory, "one H200"
        )


class TpuPlatform(JaxPlatform):
    """Google TPUs."""

    name = "tpu"
    default_layout = "tpu_rpa"
    default_dtype = "bfloat16"
    priority = 20
    mixed_steps = True
    backend = "tpu"
    hint = "install enginebay[tpu] on a machine with a TPU"

    def env(self) -> Env:
        kind = self.devices()[0].device_kind
        return Env("tpu", TPU_ARCHS.get(kind, kind), kind)

    def hardware(self) -> Hardware:
        memory = _device_memory(self.devices()[0], 16 * GIB)
        return Hardware(
            819e9,
            {"float32": 49e12, "bfloat16": 197e12, "float16": 197e12},
            memory,
            "published figures of a v5e",
        )
