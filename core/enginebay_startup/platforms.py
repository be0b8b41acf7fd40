"""Starting JAX where it is installed for devices that this machine does not have: quietly, and
without waiting for them.

With libtpu or the CUDA plugin installed and no such device, JAX still starts both: that takes
seconds and prints warnings and tracebacks of things that nobody asked for.
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

CUDA_DRIVER = "libcuda.so.1"
CUDA_PLUGINS = ("xla_cuda12", "xla_cuda13")

NOISE = ("WARNING: All log messages before absl::InitializeLog() is called", "cudart_stub.cc")
"""Parts of the lines that libraries for CUDA print when they are loaded where there is no driver.
"""


@dataclasses.dataclass(frozen=True)
class Found:
    """What JAX is installed for here, and which devices there may be."""

    plugins: frozenset[str] = frozenset()
    """Last names of the modules that plug devices into JAX."""
    libtpu: bool = False
    cuda: bool = False
    tpu: bool = False

    @property
    def starts_devices(self) -> bool:
        """Whether JAX would start something besides the CPU."""
        return self.libtpu or bool(self.plugins)


def look_around() -> Found:
    """What this machine has."""
    plugins = _installed_plugins()
    libtpu = importlib.util.find_spec("libtpu") is not None
    return Found(frozenset(plugins), libtpu, bool(plugins) and _may_have_cuda(), _may_have_tpu())


def start_jax() -> None:
    """Import JAX, without what libraries print of absent devices. On a machine that has a device
    JAX is imported and left alone.
    """
    found = look_around()
    if not found.starts_devices:
        return
    with without_noise():
        if settle_platforms(found):
            import jax

            jax.devices()  # now, while nobody hears what is loaded with it


def settle_platforms(found: Found | None = None) -> bool:
    """Let JAX use the CPU alone where it has plugins for devices that are certainly not there;
    whether this was done.

    What the user chose stays, and so does everything where a plugin is installed that we do not
    know.
    """
    found = look_around() if found is None else found
    if (
        not found.plugins <= set(CUDA_PLUGINS)
        or found.tpu
        or found.cuda
        or not found.starts_devices
    ):
        return False
    from enginebay_startup.jaxconfig import keep_to_cpu

    return keep_to_cpu()


def _installed_plugins() -> set[str]:
    """Last names of the modules that plug devices into JAX, as it finds them itself."""
    points = importlib.metadata.entry_points(group="jax_plugins")
    found = {point.value.partition(":")[0].rpartition(".")[2] for point in points}
    package = importlib.util.find_spec("jax_plugins")
    if package is not None and package.submodule_search_locations is not None:
        found |= {
            module.name for module in pkgutil.iter_modules(package.submodule_search_locations)
        }
    return found


def _may_have_tpu() -> bool:
    """Whether there is a file by which libtpu could reach a chip."""
    return any(Path("/dev").glob("accel*")) or any(Path("/dev/vfio").glob("[0-9]*"))


def _may_have_cuda() -> bool:
    """Whether the driver's library is there, without which no plugin reaches a GPU."""
    try:
        ctypes.CDLL(CUDA_DRIVER)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def without_noise() -> Iterator[None]:
    """Hold back what is written to stderr by C libraries too, and tell it afterwards without the
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
