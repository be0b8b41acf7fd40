"""What the processes of the zoo have in their environment, as the workers of a check do."""

from __future__ import annotations

import atexit
import functools
import tempfile
from collections.abc import Mapping

ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}

SEVERAL_DEVICES = "--xla_force_host_platform_device_count=4"
"""For collectives."""


def with_cache(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which all processes of this run share compiled programs: most
    programs of a faulty kernel are those of the right one. A folder that the caller names is used.
    """
    return {
        "JAX_COMPILATION_CACHE_DIR": _folder(),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        **environment,
    }


@functools.cache
def _folder() -> str:
    folder = tempfile.TemporaryDirectory(prefix="enginebay-zoo-cache-")
    atexit.register(folder.cleanup)
    return folder.name
