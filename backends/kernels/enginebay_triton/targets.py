"""Descriptions of GPUs, by which XLA compiles programs without the device.

The figures are published by NVIDIA for the boards A100 SXM 80 GB, H100 SXM and B200. The fields are
those of XLA's GpuTargetConfigProto.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Target:
    """One board: its architecture and the sizes that compilers use."""

    arch: str
    name: str
    major: int
    accelerated: bool
    num_cores: int
    fpus_per_core: int
    shared_bytes_per_core: int
    shared_bytes_per_block: int
    memory_bytes: int
    bytes_per_s: int
    l2_bytes: int
    clock_ghz: float

    @property
    def compute_capability(self) -> int:
        """The number in the name of the architecture: 90 for sm_90."""
        return self.major * 10

    @property
    def config(self) -> str:
        """The board as the text form of GpuTargetConfigProto."""
        extension = "ACCELERATED_FEATURES" if self.accelerated else "NONE"
        fields = {
            "threads_per_block_limit": 1024,
            "threads_per_warp": 32,
            "threads_per_core_limit": 2048,
            "shared_memory_per_block": 48 * 1024,
            "shared_memory_per_block_optin": self.shared_bytes_per_block,
            "shared_memory_per_core": self.shared_bytes_per_core,
            "core_count": self.num_cores,
            "fpus_per_core": self.fpus_per_core,
            "block_dim_limit_x": 2**31 - 1,
            "block_dim_limit_y": 65535,
            "block_dim_limit_z": 65535,
            "thread_dim_limit_x": 1024,
            "thread_dim_limit_y": 1024,
            "thread_dim_limit_z": 64,
            "registers_per_core_limit": 65536,
            "registers_per_block_limit": 65536,
            "memory_bandwidth": self.bytes_per_s,
            "device_memory_size": self.memory_bytes,
            "l2_cache_size": self.l2_bytes,
            "clock_rate_ghz": self.clock_ghz,
            "cuda_compute_capability": f"{{ major: {self.major} feature_extension: {extension} }}",
            "device_vendor": '"NVIDIA Corporation"',
            "device_address_bits": 64,
            "name": f'"{self.name}"',
            "driver_version": '"13.0.0"',
            "runtime_version": '"12.8.0"',
            "compile_time_toolkit_version": '"12.8.0"',
            "dnn_version": '"9.10.0"',
        }
        info = " ".join(
            f"{name} {value}" if str(value)[0] == "{" else f"{name}: {value}"
            for name, value in fields.items()
        )
        return (
            f'gpu_device_info {{ {info} }} platform_name: "CUDA" dnn_version_info {{ major: 9 '
            f'minor: 10 }} device_description_str: "{self.name}"'
        )


_A100 = Target(
    "sm_80",
    "NVIDIA A100-SXM4-80GB",
    8,
    accelerated=False,
    num_cores=108,
    fpus_per_core=64,
    shared_bytes_per_core=164 * 1024,
    shared_bytes_per_block=163 * 1024,
    memory_bytes=85_100_068_864,
    bytes_per_s=2_039_040_000_000,
    l2_bytes=40 << 20,
    clock_ghz=1.41,
)
_H100 = Target(
    "sm_90",
    "NVIDIA H100 80GB HBM3",
    9,
    accelerated=True,
    num_cores=132,
    fpus_per_core=128,
    shared_bytes_per_core=228 * 1024,
    shared_bytes_per_block=227 * 1024,
    memory_bytes=84_942_979_072,
    bytes_per_s=3_352_320_000_000,
    l2_bytes=50 << 20,
    clock_ghz=1.98,
)
_B200 = Target(
    "sm_100",
    "NVIDIA B200",
    10,
    accelerated=True,
    num_cores=148,
    fpus_per_core=128,
    shared_bytes_per_core=228 * 1024,
    shared_bytes_per_block=227 * 1024,
    memory_bytes=191_514_411_008,
    bytes_per_s=7_672_320_000_000,
    l2_bytes=126 << 20,
    clock_ghz=1.965,
)

TARGETS = {target.arch: target for target in (_A100, _H100, _B200)}

LEAST_SHARED_BYTES = 99 << 10
"""Shared memory per block, in bytes, that all GPUs of Ampere and later have (CUDA C++ Programming
Guide).
"""


def shared_bytes_per_block(arch: str) -> int:
    """Return the shared memory per block in bytes; for an unknown architecture, the smallest."""
    return TARGETS[arch].shared_bytes_per_block if arch in TARGETS else LEAST_SHARED_BYTES
