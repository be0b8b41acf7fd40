"""The `enginebay` program: the contract of its commands, and the call of the plugin that runs
them.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence

from enginebay.startup import GROUP

PLUGIN = "cli"
"""The entry point of the plugin that has `main` and registers the built-in commands."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, by default the arguments of this process, and return its exit code."""
    [point] = importlib.metadata.entry_points(group=GROUP, name=PLUGIN)
    code: int = point.load().main(argv)
    return code
