"""Ctrl-C: what is being compiled ends, and nothing after it is compiled."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from enginebay import LLM
from enginebay.errors import StoppedError
from enginebay_runtime.compiling import COMPILE_THREADS, compile_ahead
from tests.brief import BRIEF
from tests.fakes import SIZES
from tests.unit.serving import DEADLOCK_S

MANY = 10_000


@pytest.fixture
def llm(faked: None) -> Iterator[LLM]:
    with LLM(BRIEF, processors=(), **SIZES) as made:
        yield made


def test_programs_are_kept_in_order_with_few_lowered_ahead() -> None:
    lowered: list[int] = []
    kept: list[tuple[int, Any]] = []

    def keep(key: int, program: Any) -> None:
        assert len(lowered) - len(kept) <= COMPILE_THREADS + 1
        kept.append((key, program))

    compile_ahead(
        range(6), lambda key: lowered.append(key) or -key, lambda key, low: (key, low), keep
    )
    assert kept == [(key, (key, -key)) for key in range(6)]


def test_an_error_ends_compiling_after_what_is_being_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, may_end = threading.Semaphore(0), threading.Event()
    compiled: list[int] = []

    class Pool(ThreadPoolExecutor):
        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            may_end.set()
            super().shutdown(wait)

    def compile_one(key: int, _: object) -> int:
        if key:
            begun.release()
            assert may_end.wait(DEADLOCK_S)
        compiled.append(key)
        return key

    def keep(key: int, _: object) -> None:
        for _ in range(COMPILE_THREADS - 1):  # the other threads compile, and none begins more
            assert begun.acquire(timeout=DEADLOCK_S)
        raise KeyboardInterrupt

    monkeypatch.setattr("enginebay_runtime.compiling.ThreadPoolExecutor", Pool)
    with pytest.raises(KeyboardInterrupt):
        compile_ahead(range(MANY), lambda key: key, compile_one, keep)
    assert sorted(compiled) == list(range(COMPILE_THREADS))


def test_an_interrupted_warmup_ends_after_the_program_being_compiled(llm: LLM) -> None:
    num_compiled = 0
    interrupted = threading.Event()

    def warmup(progress: Any) -> int:
        nonlocal num_compiled
        for number in range(MANY):
            num_compiled += 1
            if number == 2:
                # A signal between the caller's last instruction and its wait would not wake it.
                time.sleep(0.2)
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                assert interrupted.wait(DEADLOCK_S)
            progress(number + 1, MANY, "a program")
        return MANY

    llm.engine.warmup = warmup
    with pytest.raises(KeyboardInterrupt):
        llm.warmup()
    interrupted.set()
    assert llm.run_on_engine(lambda: num_compiled) == 3
    assert len(llm.generate("Once", None)) == 1


def test_close_ends_a_warmup_after_the_program_being_compiled(llm: LLM) -> None:
    compiled: list[int] = []
    closed: list[threading.Thread] = []

    def warmup(progress: Any) -> int:
        for number in range(MANY):
            compiled.append(number)
            if number == 2:
                closed.append(threading.Thread(target=llm.close))
                closed[0].start()
                while not llm._is_closing.wait(0.01):
                    assert closed[0].is_alive()
            progress(number + 1, MANY, "a program")
        return MANY

    llm.engine.warmup = warmup
    with pytest.raises(StoppedError, match="interrupted"):
        llm.warmup()
    closed[0].join(DEADLOCK_S)
    assert compiled == [0, 1, 2]


def test_a_call_that_was_given_up_before_its_turn_never_runs(llm: LLM) -> None:
    ran: list[str] = []
    begun, may_end = threading.Event(), threading.Event()
    other = threading.Thread(
        target=lambda: llm.run_on_engine(lambda: (begun.set(), may_end.wait(DEADLOCK_S))),
        daemon=True,
    )
    other.start()
    assert begun.wait(DEADLOCK_S)
    main = threading.main_thread().ident or 0

    def interrupted() -> None:
        threading.Timer(0.05, signal.pthread_kill, (main, signal.SIGINT)).start()
        llm.run_on_engine(lambda: ran.append("late"))

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    may_end.set()
    other.join(DEADLOCK_S)
    assert llm.run_on_engine(lambda: list(ran)) == []


SLOW_TO_END = """
import sys, time
from enginebay.cli.program import main as program

def work(arguments):
    try:
        print("working", flush=True)
        time.sleep(300)
    finally:
        print("ending", flush=True)
        if arguments == ["slowly"]:
            time.sleep(300)

sys.modules["enginebay.cli.program"]._dispatch = work
sys.exit(program(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("how", "count", "code"), [("quickly", 1, 130), ("slowly", 2, -signal.SIGINT)]
)
def test_ctrl_c_ends_a_command_and_a_second_one_the_process(
    how: str, count: int, code: int
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_TO_END, how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in ("working\n", "ending\n")[:count]:
        assert process.stdout.readline() == line
        process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=DEADLOCK_S)
    assert (process.returncode, errors.strip()) == (code, "")
