"""Refuses to compile where the process has too few memory maps left, because XLA would crash."""

from __future__ import annotations

import sys
from pathlib import Path

from enginebay.errors import CompilationError, explain

LIMIT = Path("/proc/sys/vm/max_map_count")
MAPS = Path("/proc/self/maps")

SHARE = 0.9
"""The share of the maps that programs may take. A step of 30 layers takes about 500."""


def require_maps(what: str) -> None:
    """CompilationError when this process has so many memory maps that the program of `what` may get
    none. Each compiled function takes three: XLA would crash. Where the system tells no limit, this
    does nothing.
    """
    if sys.platform != "linux":
        return
    try:
        limit = int(LIMIT.read_text(encoding="ascii"))
        with MAPS.open("rb") as lines:
            num = sum(1 for _ in lines)
    except (OSError, ValueError):  # a sandbox without /proc
        return
    if num > SHARE * limit:
        raise CompilationError(
            explain(
                f"{what} is not compiled: this process has {num} memory maps, most of them of"
                " compiled programs",
                f"at most {int(SHARE * limit)}",
                f"Allow more (sysctl -w vm.max_map_count={4 * limit}), or fewer sizes of steps"
                " (max_num_seqs, max_num_batched_tokens).",
            )
        )
