"""Versions, system, processor and devices, for bug reports and next to measurements."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform as host
from pathlib import Path
from typing import Any

import jax

from enginebay import __version__
from enginebay.jax_config import compiled_programs

PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "transformers",
    "tokenizers",
    "numpy",
    "pydantic",
    "pluggy",
    "safetensors",
    "jax-triton",
    "libtpu",
)


def environment(*, with_devices: bool = True) -> dict[str, Any]:
    """Return the record that `enginebay env --json` prints. Without devices JAX starts none, which
    would take a GPU's memory.
    """
    return {
        "enginebay": __version__,
        "python": host.python_version(),
        "system": f"{host.system()} {host.release()} {host.machine()}",
        "packages": {package: _version(package) for package in PACKAGES},
        "devices": [f"{d.platform}:{d.id} {d.device_kind}" for d in jax.devices()]
        if with_devices
        else [],
        "compiled_programs": _compiled_programs(),
    }


def _compiled_programs() -> dict[str, Any]:
    folder, files = compiled_programs()
    size = 0
    for path in files:
        with contextlib.suppress(OSError):  # another process may remove it
            size += path.stat().st_size
    return {"folder": str(folder), "files": len(files), "bytes": size}


def clear_compiled_programs() -> None:
    """Remove the files of compiled programs. Processes that run keep the programs they have."""
    _, files = compiled_programs()
    for path in files:
        path.unlink(missing_ok=True)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def free_bytes(device: jax.Device, total: int) -> int:
    """Return the bytes that can still be allocated on a device, or `total` where the device does
    not report its memory use.
    """
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
    if device.platform != "cpu":
        return total
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        (available,) = [line for line in lines if line.startswith("MemAvailable:")]
        return int(available.split()[1]) * 1024
    except (OSError, ValueError):  # /proc exists on Linux only
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
