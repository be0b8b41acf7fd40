#!/usr/bin/env python3
"""Runs a command beside busy processes: python3 tools/beside_load.py COMMAND [ARGUMENT ...]

Four processes compute until the command has ended, or until this one has, however it ends. The exit
code is the command's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

NUM_BUSY = 4
BUSY = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    sum(range(10_000_000))
"""


def main(command: Sequence[str]) -> int:
    """Run the command, and return its exit code."""
    if not command:
        print(__doc__.partition("\n")[0], file=sys.stderr)
        return 2
    busy = [
        subprocess.Popen([sys.executable, "-c", BUSY, str(os.getpid())]) for _ in range(NUM_BUSY)
    ]
    try:
        return subprocess.run(command, check=False).returncode
    finally:
        for process in busy:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
