"""The `enginebay` program: finds the command, runs it, and turns errors into messages and exit
codes.

`command` is the contract of commands, `options` has the flags that every command with an engine
shares, `show` and `table_rows` print tables and progress.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, by default the arguments of this process, and return its exit code."""
    from enginebay.cli.program import main as run

    return run(argv)
