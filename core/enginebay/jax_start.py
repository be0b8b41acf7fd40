"""Starts JAX quietly and quickly where it is installed for devices that this machine does not have.

If libtpu or the CUDA plugin is installed without a device, JAX still starts both, which takes
seconds and prints warnings and tracebacks that help no user.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib.metadata
import importlib.util
import os
import pkgutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from enginebay.config import EngineConfig

CUDA_DRIVER = "libcuda.so.1"
CUDA_PLUGINS = ("xla_cuda12", "xla_cuda13")

NOISE = ("WARNING: All log messages before absl::InitializeLog() is called", "cudart_stub.cc")
"""Parts of lines that CUDA libraries print when they are loaded without a driver."""


@dataclasses.dataclass(frozen=True)
class InstalledPlugins:
    """The device plugins of JAX that are installed here, and the devices that may be present."""

    plugins: frozenset[str] = frozenset()
    """Last names of the modules that add devices to JAX."""
    libtpu: bool = False
    cuda: bool = False
    tpu: bool = False

    @property
    def starts_devices(self) -> bool:
        """Return whether JAX would start another platform besides the CPU."""
        return self.libtpu or bool(self.plugins)


def look_around() -> InstalledPlugins:
    """Return what this machine has."""
    plugins = _installed_plugins()
    libtpu = importlib.util.find_spec("libtpu") is not None
    return InstalledPlugins(
        frozenset(plugins), libtpu, bool(plugins) and _may_have_cuda(), _may_have_tpu()
    )


def start_jax() -> None:
    """Import JAX without the messages that libraries print about absent devices. On a machine with
    a device, JAX is only imported.
    """
    found = look_around()
    if not found.starts_devices:
        return
    with without_noise():
        if settle_platforms(found):
            import jax

            jax.devices()  # load all libraries now, while their messages are held back


def settle_platforms(found: InstalledPlugins | None = None) -> bool:
    """Restrict JAX to the CPU if its plugins are for devices that are certainly absent. Return
    whether that was done.

    Platforms that the user chose are kept, and nothing changes if an unknown plugin is installed.
    """
    found = look_around() if found is None else found
    if (
        not found.plugins <= set(CUDA_PLUGINS)
        or found.tpu
        or found.cuda
        or not found.starts_devices
    ):
        return False
    from enginebay.jax_config import keep_to_cpu

    return keep_to_cpu()


def _installed_plugins() -> set[str]:
    """Return the last names of the modules that add devices to JAX, found as JAX finds them."""
    points = importlib.metadata.entry_points(group="jax_plugins")
    found = {point.value.partition(":")[0].rpartition(".")[2] for point in points}
    package = importlib.util.find_spec("jax_plugins")
    if package is not None and package.submodule_search_locations is not None:
        found |= {
            module.name for module in pkgutil.iter_modules(package.submodule_search_locations)
        }
    return found


def _may_have_tpu() -> bool:
    """Return whether there is a file through which libtpu could reach a chip."""
    return any(Path("/dev").glob("accel*")) or any(Path("/dev/vfio").glob("[0-9]*"))


def _may_have_cuda() -> bool:
    """Return whether the driver's library exists, which every plugin needs to reach a GPU."""
    try:
        ctypes.CDLL(CUDA_DRIVER)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def without_noise() -> Iterator[None]:
    """Hold back what is written to stderr, by C libraries too, and write it afterwards without the
    lines of NOISE.
    """
    sys.stderr.flush()
    real = os.dup(2)
    try:
        with tempfile.TemporaryFile() as held:
            os.dup2(held.fileno(), 2)
            try:
                yield
            finally:
                sys.stderr.flush()
                os.dup2(real, 2)
                held.seek(0)
                lines = held.read().decode(errors="replace").splitlines(keepends=True)
                sys.stderr.write(
                    "".join(line for line in lines if not any(part in line for part in NOISE))
                )
    finally:
        os.close(real)


def prepare_jax(config: EngineConfig) -> None:
    """Set JAX's compilation cache and platforms, before an engine is planned. ConfigError for a
    cache folder that cannot be trusted.
    """
    from enginebay.jax_config import configure_compile_cache

    configure_compile_cache(config.compile_cache)
    settle_platforms()
