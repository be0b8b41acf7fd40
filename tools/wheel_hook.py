"""Build hook of the wheel: with ENGINEBAY_WHEEL_CPU=x86-64-v3,x86-64-v4 (or one of them) the wheel
contains the C++ kernels, compiled for each level; a processor uses the best that it has.

Without the variable the wheel is plain Python, and kernels are compiled on the machine that uses
them. With it, the wheel is for this system only. JAX must be installed where the wheel is built:
`pip wheel . --no-deps --no-build-isolation`.
"""

from __future__ import annotations

import concurrent.futures
import functools
import os
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

VARIABLE = "ENGINEBAY_WHEEL_CPU"


class NativeHook(BuildHookInterface):  # type: ignore[type-arg]
    """Compiles every src/*.cc of enginebay_native into enginebay_native/lib of the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Runs before the wheel is built; `version` is "standard" or "editable"."""
        levels = [level for level in os.environ.get(VARIABLE, "").split(",") if level]
        if not levels or version != "standard":
            return
        sys.path[:0] = [str(Path(self.root) / folder) for folder in ("core", "backends/kernels")]
        from enginebay_native.compiling import SOURCES, build_library

        self._scratch = tempfile.TemporaryDirectory(prefix="enginebay-wheel-")
        names = [source.stem for source in sorted(SOURCES.glob("*.cc"))]
        make = functools.partial(build_library, folder=Path(self._scratch.name))
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            for made in pool.map(make, names * len(levels), sorted(levels * len(names))):
                build_data["force_include"][str(made)] = f"enginebay_native/lib/{made.name}"
        build_data["pure_python"] = False
        build_data["tag"] = (
            f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        )

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Runs after the wheel is built."""
        del version, build_data, artifact_path
        scratch = getattr(self, "_scratch", None)
        if scratch is not None:
            scratch.cleanup()
