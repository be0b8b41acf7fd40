"""What programs that were compiled for this machine depend on."""

from __future__ import annotations

import platform
from pathlib import Path


def processor_features() -> str:
    """Return the features of the processor. Machines with different ones may share a folder of
    compiled programs.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    kept = ("flags", "Features", "model name")
    return " ".join(
        [platform.machine(), *sorted({line for line in lines if line.startswith(kept)})]
    )
