"""The `enginebay` program, as far as the core knows it: the contract of its commands, and where its
dispatch lies.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence

from enginebay.hooks import GROUP

PLUGIN = "cli"
"""The entry point whose module has `main`, and registers the commands that are always there."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, by default the process's own, and return its exit code."""
    [point] = importlib.metadata.entry_points(group=GROUP, name=PLUGIN)
    code: int = point.load().main(argv)
    return code
