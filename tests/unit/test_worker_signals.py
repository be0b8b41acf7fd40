"""Workers outlive the signals of a stop, and end with their parent; one that is killed is the
server's fault.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from enginebay.config_sections import GuidedLimits
from enginebay.contracts.text import Message
from enginebay.errors import StoppedError
from enginebay.grammar import Structure
from enginebay.text.guides.guarded import GuardedLibrary
from enginebay.text.tokenizer import TextTokenizer
from enginebay.text.worker.__main__ import _goes_on_with_pipe
from enginebay.text.worker.process import KilledError, LimitedWorker, WorkerLimits
from tests.unit.serving import DEADLOCK_S
from tests.unit.test_chat_templates import byte_level
from tests.unit.test_mask_limits import SETTINGS

LIMITS = WorkerLimits(60.0, 1 << 28, 1 << 22)

PARENT = """
import os, signal, sys, threading
from enginebay.text.worker.process import LimitedWorker, WorkerLimits
limits = WorkerLimits(60.0, 1 << 28, 1 << 22)
worker = LimitedWorker("tests.unit.worker_tasks:Tasks", {"base": 3}, limits)
worker.start()
if sys.argv[1] == "busy":
    threading.Thread(target=worker.ask, args=({"do": "sleep"},), daemon=True).start()
if sys.argv[1] == "paused":
    worker.pause()
print(worker.pid, flush=True)
signal.pause()
"""


@pytest.fixture
def worker() -> Iterator[LimitedWorker]:
    made = LimitedWorker("tests.unit.worker_tasks:Tasks", {"base": 3}, LIMITS)
    made.start()
    yield made
    made.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_serves_on_after_the_signal_of_a_stop(
    worker: LimitedWorker, number: signal.Signals
) -> None:
    before = worker.pid
    os.kill(int(before or 0), number)
    assert worker.ask({"do": "add", "value": 4}) == 7
    assert worker.pid == before


def test_a_paused_worker_answers_the_next_request(worker: LimitedWorker) -> None:
    worker.pause()
    worker.pause()
    until_s = time.monotonic() + DEADLOCK_S
    while sys.platform == "linux" and _state_of(int(worker.pid or 0)) not in ("T", "t"):
        assert time.monotonic() < until_s, "the worker goes on"
        time.sleep(0.01)
    assert worker.ask({"do": "add", "value": 4}) == 7
    worker.pause()
    worker.pause(is_paused=False)
    assert worker.ask({"do": "add", "value": 4}) == 7
    worker.pause()
    worker.close()
    assert worker.pid is None


def test_a_worker_that_is_interrupted_is_replaced_at_once(worker: LimitedWorker) -> None:
    """The system takes a while to end a process."""
    for _ in range(3):
        worker.interrupt()
        assert worker.pid is None
        worker.start()
        assert worker.ask({"do": "add", "value": 4}) == 7


def test_a_worker_that_would_not_go_on_is_never_stopped(
    worker: LimitedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    assert _goes_on_with_pipe(reader) == (sys.platform == "linux")

    def refused(*_: Any) -> int:
        raise PermissionError("a sandbox")

    monkeypatch.setattr(fcntl, "fcntl", refused)
    assert not _goes_on_with_pipe(reader)
    monkeypatch.undo()
    os.close(reader)
    os.close(writer)
    process = worker._process
    assert process is not None
    said: list[int] = []
    monkeypatch.setattr(process, "signal", said.append)
    process.goes_on = False
    worker.pause()
    assert said == []
    process.goes_on = True
    worker.pause()
    assert said == [signal.SIGSTOP]


@pytest.mark.parametrize("work", ["idle", "busy", "paused"])
def test_a_worker_ends_when_its_parent_was_killed(work: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, work],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until_s = time.monotonic() + DEADLOCK_S
    while Path(f"/proc/{pid}").exists() and _state_of(pid) != "Z":
        assert time.monotonic() < until_s, "the worker goes on without its parent"
        time.sleep(0.02)


def _state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def killed(*_: Any, **__: Any) -> Any:
    raise KilledError("its worker process was killed")


def test_a_mask_whose_process_is_killed_twice_is_no_fault_of_the_constraint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = GuardedLibrary(SETTINGS, GuidedLimits())
    constraint = library.compile(Structure("grammar", "[-1, 0, 4]")).start()
    monkeypatch.setattr(LimitedWorker, "ask", killed)
    constraint.accept(5)
    with pytest.raises(StoppedError, match="killed"):
        constraint.bits()
    library.close()


def test_a_structure_whose_process_is_killed_twice_is_no_fault_of_the_structure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = GuardedLibrary(SETTINGS, GuidedLimits())
    monkeypatch.setattr(LimitedWorker, "ask", killed)
    with pytest.raises(StoppedError, match="killed"):
        library.compile(Structure("grammar", "[-1, 0, 4]"))
    library.close()


def test_a_chat_whose_process_is_killed_twice_is_no_fault_of_its_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LimitedWorker, "ask", killed)
    messages: list[Message] = [{"role": "user", "content": "hello"}]
    own = TextTokenizer(byte_level().inner)
    with pytest.raises(StoppedError, match="killed"):
        own.apply_chat_template(messages)
    own.close()
