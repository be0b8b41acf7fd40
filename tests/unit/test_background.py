"""Background: jobs beside whoever started them."""

from __future__ import annotations

import logging
import threading

import pytest

from enginebay_runtime.background import Background, EndedError
from tests.unit.serving import DEADLOCK_S


def test_jobs_run_in_order_on_one_thread() -> None:
    ran: list[tuple[int, str]] = []
    jobs = [lambda n=n: ran.append((n, threading.current_thread().name)) for n in range(3)]
    background = Background(jobs, "beside")
    assert not background.is_done
    background.start()
    background.start()
    assert background.wait(DEADLOCK_S)
    assert ran == [(0, "beside"), (1, "beside"), (2, "beside")]
    assert Background().is_done


def test_stopping_waits_for_the_job_that_runs_and_starting_goes_on_with_the_next() -> None:
    begun, may_end = threading.Event(), threading.Event()
    ran: list[str] = []

    def slow() -> None:
        begun.set()
        assert may_end.wait(DEADLOCK_S)
        ran.append("slow")

    background = Background([slow, lambda: ran.append("next")])
    background.start()
    assert begun.wait(DEADLOCK_S)
    stopper = threading.Thread(target=background.stop)
    stopper.start()
    stopper.join(0.05)
    assert stopper.is_alive(), "the job is not over"
    may_end.set()
    stopper.join(DEADLOCK_S)
    assert (ran, background.is_done) == (["slow"], False)
    assert not background.stop(), "nothing runs"
    background.start()
    assert background.wait(DEADLOCK_S)
    assert ran == ["slow", "next"]


def test_a_job_that_raises_is_logged_and_the_next_runs(caplog: pytest.LogCaptureFixture) -> None:
    ran: list[str] = []

    def fails() -> None:
        ran.append("tried")
        raise MemoryError("no room")

    background = Background([fails, lambda: ran.append("next")], "beside")
    with caplog.at_level(logging.ERROR, "enginebay.background"):
        background.start()
        assert background.wait(DEADLOCK_S)
    assert "thread beside goes on after an error" in caplog.text
    assert "no room" in caplog.text
    assert ran == ["tried", "next"]


def test_a_job_that_is_interrupted_runs_again() -> None:
    ran: list[str] = []

    def ends_once() -> None:
        ran.append("tried")
        if len(ran) == 1:
            raise EndedError

    background = Background([ends_once, lambda: ran.append("next")])
    background.start()
    assert not background.wait(DEADLOCK_S)
    background.start()
    assert background.wait(DEADLOCK_S)
    assert ran == ["tried", "tried", "next"]


def test_no_job_begins_when_the_program_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Thread()
    monkeypatch.setattr(threading, "main_thread", lambda: ended)
    background = Background([lambda: pytest.fail("it began")])
    background.start()
    assert not background.wait(DEADLOCK_S)
