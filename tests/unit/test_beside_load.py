"""tools/beside_load.py: a command runs beside busy processes, which end with it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

TOOL = Path(__file__).resolve().parents[2] / "tools" / "beside_load.py"
CHILDREN = (
    "import os; parent = os.getppid(); "
    "print(open(f'/proc/{parent}/task/{parent}/children').read()); exit(3)"
)


def runs(process: int) -> bool:
    """Whether a process is there, and is no zombie."""
    try:
        return "(zombie)" not in Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_command_has_four_busy_neighbours_which_end_with_it() -> None:
    done = subprocess.run(
        [sys.executable, TOOL, sys.executable, "-c", CHILDREN],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3
    children = [int(word) for word in done.stdout.split()]
    assert len(children) == 5  # the command itself too
    assert not any(map(runs, children))


def test_they_end_where_their_parent_is_killed() -> None:
    """The busy processes look for their parent."""
    parent = subprocess.Popen([sys.executable, TOOL, "sleep", "0.5"], start_new_session=True)
    listing = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    while len(listing.read_text().split()) < 5:
        time.sleep(0.01)
    children = [int(word) for word in listing.read_text().split()]
    os.kill(parent.pid, 9)
    parent.wait()
    deadline_s = time.monotonic() + 60
    while any(map(runs, children)):
        assert time.monotonic() < deadline_s, "a busy process outlived its parent"
        time.sleep(0.05)
