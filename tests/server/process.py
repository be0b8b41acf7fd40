"""A real `enginebay serve` process, and what it writes."""

from __future__ import annotations

import functools
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Self

START_S, END_S = 240, 60
SMALL = ("--max-model-len", "256", "--max-num-seqs", "4", "--max-num-batched-tokens", "64")
COMMAND = [sys.executable, "-m", "enginebay", "serve"]
FEW_SIZES = [sys.executable, "-m", "tests.server.few_sizes", "serve"]


class ServerProcess:
    """`enginebay serve` on a port of its own. Use it in a `with` block."""

    def __init__(
        self,
        *flags: str,
        environment: dict[str, str] | None = None,
        models: Sequence[str] = ("demo",),
        command: Sequence[str] = COMMAND,
    ) -> None:
        self._process = subprocess.Popen(
            [*command, *models, "--port", "0", *SMALL, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        self._written: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.lines: list[str] = []
        self.errors: list[str] = []
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        ends = (functools.partial(self._written.put, None), lambda: None)
        readers = (
            (self._process.stdout, self._written.put, ends[0]),
            (self._process.stderr, self.errors.append, ends[1]),
        )
        self._threads = [threading.Thread(target=_read, args=args) for args in readers]
        for thread in self._threads:
            thread.start()
        line = self.wait_for("serving ")
        found = re.search(r"at (https?://\S+)/v1", line)
        assert found is not None
        self.url = found[1]

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_for(self, text: str) -> str:
        """The line of its output that has a text."""
        until_s = time.monotonic() + START_S
        while (line := self._written.get(timeout=max(0.1, until_s - time.monotonic()))) is not None:
            self.lines.append(line)
            if text in line:
                return line
        raise AssertionError(f"the server ended without {text!r}: {''.join(self.errors)}")

    @property
    def children(self) -> list[int]:
        """Its child processes, and theirs."""
        found, parents = [], [self.pid]
        while parents:
            for file in Path(f"/proc/{parents.pop()}/task").glob("*/children"):
                new = [int(one) for one in file.read_text().split()]
                parents += new
                found += new
        return found

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send(signal.SIGTERM)

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def exit_code(self) -> int:
        """Wait for its end."""
        return self._process.wait(END_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self.terminate()
            try:
                self.exit_code()
            finally:
                self._process.kill()
        for thread in self._threads:
            thread.join()


def _read(stream: IO[str], take: Callable[[str], object], end: Callable[[], object]) -> None:
    with stream:
        for line in stream:
            take(line)
    end()


def is_running(pid: int) -> bool:
    """Whether a process is there, and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def refused(*arguments: str) -> str:
    """The one line with which `enginebay serve` refuses to start."""
    done = subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=START_S, check=False
    )
    assert done.returncode == 2, done.stderr
    assert not done.stdout
    lines = [line for line in done.stderr.splitlines() if not line.endswith(" ...")]
    assert len(lines) == 1, done.stderr
    return lines[0]
