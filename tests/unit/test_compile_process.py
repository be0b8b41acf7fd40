"""Steps beside requests are compiled by another process, which loses nothing when it dies."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from enginebay import LLM
from enginebay.config import EngineConfig
from enginebay.text.worker.process import LimitedWorker
from enginebay_runtime import compile_process
from enginebay_runtime.background import Background, EndedError
from enginebay_runtime.compile_process import CompilePriority, CompileProcess
from enginebay_runtime.compile_worker import CompileWorker, encoded
from enginebay_runtime.compiling import StepSource
from enginebay_runtime.layered import MIN_LAYERS
from enginebay_runtime.local import LocalExecutor
from enginebay_runtime.stored_programs import ProgramStore
from tests.brief import ROOT, TINY
from tests.unit.checkpoints import model_of, random_tensors, write
from tests.unit.serving import DEADLOCK_S

SHAPES: Any = ("shapes", 1)
PART: Any = "part"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layers")
    fields = {"num_hidden_layers": MIN_LAYERS, "vocab_size": 96}
    write(folder, random_tensors(model_of(**fields)), **fields)
    shutil.copy(Path(TINY) / "tokenizer.json", folder)
    return folder


def run(model: Path, folder: Path, mode: str) -> Any:
    folder.mkdir(mode=0o700, exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.compiled_elsewhere", str(model), str(folder), mode],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        timeout=600,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.long
def test_steps_beside_requests_are_compiled_elsewhere(model: Path, tmp_path: Path) -> None:
    beside = run(model, tmp_path / "beside", "beside")
    assert beside["events"] == {}, "this process traced or compiled a step"
    assert beside["first"] == beside["tokens"]
    assert is_gone(beside["pid"])
    killed = run(model, tmp_path / "killed", "killed")
    assert "compiled" in killed["events"], "what it had not made is compiled here"
    assert killed["first"] == killed["tokens"] == beside["tokens"]
    assert killed["programs"] == beside["programs"]
    ended = run(model, tmp_path / "ended", "ended")
    assert not ended["done"]
    assert is_gone(ended["pid"])


def config() -> EngineConfig:
    return EngineConfig(model=str(TINY))


class Never:
    """Takes a step, and does not answer."""

    def answer_bytes(self, request: bytes) -> bytes:
        threading.Event().wait()
        return request


class Slow:
    """Answers after a time of its own."""

    def answer_bytes(self, request: bytes) -> bytes:
        end_s = time.thread_time() + 0.1
        while time.thread_time() < end_s:
            pass
        return b""


class Refuses:
    """Can compile nothing."""

    def answer_bytes(self, request: bytes) -> bytes:
        return b"other parts"


def never(_: Any) -> Never:
    return Never()


def slow(_: Any) -> Slow:
    return Slow()


def refuses(_: Any) -> Refuses:
    return Refuses()


def test_a_step_that_is_interrupted_is_compiled_after_another_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compile_process, "TARGET", f"{__name__}:never")
    process = CompileProcess(config(), "digest", lambda: False)
    monkeypatch.setattr(compile_process, "POLL_S", 0.01)
    ran: list[str] = []
    begun = threading.Event()

    def job() -> None:
        begun.set()
        if ran:
            ran.append("again")
            return
        ran.append("first")
        process.compile(SHAPES, PART)

    background = Background([job], helper=process)
    background.start()
    assert begun.wait(DEADLOCK_S)
    process.rest()
    assert background.stop()
    assert not background.is_done
    assert process.pid is None
    background.start()
    assert background.wait(DEADLOCK_S)
    assert ran == ["first", "again"]


@pytest.mark.long
def test_a_process_ends_with_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_process, "TARGET", f"{__name__}:never")
    monkeypatch.setattr(compile_process, "POLL_S", 0.01)
    process = CompileProcess(config(), "digest", lambda: False)
    ended = threading.Thread()
    monkeypatch.setattr(threading, "main_thread", lambda: ended)
    with pytest.raises(EndedError):
        process.compile(SHAPES, PART)
    assert process.pid is None


@pytest.mark.long
def test_a_compilation_ends_at_its_time_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compile_process, "TARGET", f"{__name__}:never")
    limits = dataclasses.replace(compile_process.LIMITS, time_s=0.3)
    monkeypatch.setattr(compile_process, "LIMITS", limits)
    process = CompileProcess(config(), "digest", lambda: False)
    assert not process.compile(SHAPES, PART)
    assert "LimitError: time" in caplog.text
    assert process.pid is None


@pytest.mark.long
def test_the_process_ends_with_a_job_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_process, "TARGET", f"{__name__}:slow")
    process = CompileProcess(config(), "digest", lambda: False)

    def job() -> None:
        assert process.compile(SHAPES, PART)
        assert process.pid is not None
        raise MemoryError("no room")

    background = Background([job], helper=process)
    background.start()
    assert background.wait(DEADLOCK_S)
    assert process.pid is None


@pytest.mark.long
def test_a_step_that_cannot_be_stored_is_compiled_by_the_one_who_asks(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    with LLM(str(model), compile_cache=str(tmp_path), max_model_len=32, max_num_seqs=1) as llm:
        executor = llm.engine.executor
        assert isinstance(executor, LocalExecutor)
        parts, source = executor.parts, StepSource.of(executor)
        worker = CompileWorker(parts.config.model_dump_json(), parts.program_digest)
        key = next(key for key in llm.engine._whole_steps() if key.kind == "decode")  # type: ignore[attr-defined]
        monkeypatch.setattr(ProgramStore, "is_used", True)  # the line below replaces a function
        asked = encoded(source.shapes, key)
        with monkeypatch.context() as patch:
            patch.setattr(ProgramStore, "save", lambda *_: None)
            assert worker.answer_bytes(asked) == b"it cannot be stored"
        assert worker.answer_bytes(asked) == b""
        other = dataclasses.replace(source.shapes, settings=())
        assert worker.answer_bytes(encoded(other, key)) == b"JAX has other settings"


@pytest.mark.long
def test_a_process_makes_way_for_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stops and goes on in turn while steps run, and ends its work all the same."""
    monkeypatch.setattr(compile_process, "TARGET", f"{__name__}:slow")
    monkeypatch.setattr(compile_process, "POLL_S", 0.005)
    monkeypatch.setattr(compile_process, "PAUSE_S", 0.01)
    monkeypatch.setattr(compile_process, "RUN_S", 0.005)
    said: list[bool] = []
    pause = LimitedWorker.pause

    def told(worker: LimitedWorker, *, is_paused: bool = True) -> None:
        said.append(is_paused)
        pause(worker, is_paused=is_paused)

    monkeypatch.setattr(LimitedWorker, "pause", told)
    process = CompileProcess(config(), "digest", lambda: True)
    assert process.compile(SHAPES, PART)
    assert process.pid is not None
    process.rest()
    assert process.pid is None
    assert said[:4] == [True, False] * 2
    said.clear()
    cases: list[tuple[bool, CompilePriority]] = [(False, "pauses"), (True, "idle"), (True, "high")]
    for is_busy, priority in cases:
        process = CompileProcess(config(), "digest", lambda is_busy=is_busy: is_busy)
        assert process.compile(SHAPES, PART, priority=priority)
        process.close()
        assert said == []


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="needs groups of sessions")
def test_its_session_is_nice_unless_it_makes_no_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux shares cores between sessions before it looks at the priority of a process."""
    monkeypatch.setattr(compile_process, "TARGET", f"{__name__}:slow")
    own = Path("/proc/self/autogroup").read_text()
    process, found = CompileProcess(config(), "digest", lambda: False), []
    priorities: tuple[CompilePriority, ...] = ("idle", "high", "pauses")
    for priority in priorities:
        assert process.compile(SHAPES, PART, priority=priority)
        found.append(Path(f"/proc/{process.pid}/autogroup").read_text().split()[-1])
    process.close()
    assert found == ["19", "0", "19"]
    assert Path("/proc/self/autogroup").read_text() == own


@pytest.mark.parametrize("target", ["refuses", "missing"])
def test_a_process_that_cannot_compile_is_not_asked_again(
    target: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compile_process, "TARGET", f"{__name__}:{target}")
    process = CompileProcess(config(), "digest", lambda: False)
    with caplog.at_level("WARNING", "enginebay_runtime"):
        assert not process.compile(SHAPES, PART)
    assert "another process cannot compile part" in caplog.text
    assert process.pid is None
    assert not process.compile(SHAPES, PART)
    assert process.pid is None, "it is not started again"
