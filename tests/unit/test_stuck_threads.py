"""Whatever is closed waits a limited time for its thread, and names a thread that hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from enginebay import LLM, waits
from enginebay.config_sections import GuidedLimits
from enginebay.serving.delivery import Delivery
from enginebay.serving.running import Running, TokenEvent
from enginebay.text.guides import masks
from enginebay.text.worker import process
from enginebay_esurge.prometheus import MetricsServer
from enginebay_esurge.repeating import Repeater
from enginebay_paged.page_files import PageFiles
from enginebay_runtime.background import Background
from enginebay_runtime.host_pages import HostPages
from tests.brief import BRIEF
from tests.fakes import SIZES
from tests.unit.loops import request

END_S, HANGS_S = 0.2, 60.0
Hang = Callable[..., Any]
Close = Callable[[], object]


def closes_llm(hang: Hang, _: Path) -> tuple[Close, str]:
    llm = LLM(BRIEF, **SIZES)
    threading.Thread(target=llm.run_on_engine, args=(hang,), daemon=True).start()
    return llm.close, "enginebay-loop"


def closes_delivery(hang: Hang, _: Path) -> tuple[Close, str]:
    delivery = Delivery(lambda _: None)
    delivery.due.append((Running(request("a"), hang, delivery.due), TokenEvent(())))
    delivery.close()
    return delivery.join, "enginebay-delivery"


def closes_masks(hang: Hang, _: Path) -> tuple[Close, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masks, "_start", hang)
        worker = masks.MaskWorker({}, GuidedLimits())
        worker.start()
    return worker.close, "enginebay-masks"


def closes_repeater(hang: Hang, _: Path) -> tuple[Close, str]:
    return Repeater("repeats", 0.0, hang).stop, "repeats"


def closes_metrics(hang: Hang, _: Path) -> tuple[Close, str]:
    server = MetricsServer(CollectorRegistry(), "127.0.0.1", 0)
    server._server.service_actions = hang  # type: ignore[method-assign]
    return server.close, server._thread.name


def closes_background(hang: Hang, _: Path) -> tuple[Close, str]:
    background = Background([hang], "beside")
    background.start()
    return background.stop, "beside"


def closes_host_pages(hang: Hang, _: Path) -> tuple[Close, str]:
    parts: Any = SimpleNamespace(model=SimpleNamespace(info=SimpleNamespace(cache_groups=())))
    pages = HostPages(parts, {}, {})
    pages._unread["group", 0] = pages._thread.submit(hang)
    return pages.close, "enginebay-host-pages"


def closes_page_files(hang: Hang, folder: Path) -> tuple[Close, str]:
    files = PageFiles(folder, 2**20)
    files._write_whole = hang  # type: ignore[method-assign]
    files.keep("group", bytes(16), b"page", 0.0)
    return files.close, "enginebay-prefix-files"


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hang]:
    """A function that returns when the test is over; it is running when something is closed."""
    monkeypatch.setattr(waits, "END_S", END_S)
    begun, may_end = threading.Event(), threading.Event()

    def hangs(*_: object) -> None:
        begun.set()
        may_end.wait(HANGS_S)

    hangs.begun = begun  # type: ignore[attr-defined]
    yield hangs
    may_end.set()


@pytest.mark.parametrize(
    "make",
    [
        closes_llm,
        closes_delivery,
        closes_masks,
        closes_repeater,
        closes_metrics,
        closes_background,
        closes_host_pages,
        closes_page_files,
    ],
)
def test_an_end_waits_a_limited_time_for_a_thread_that_hangs(
    make: Callable[[Hang, Path], tuple[Close, str]],
    hang: Any,
    faked: None,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    close, name = make(hang, tmp_path)
    assert hang.begun.wait(HANGS_S)
    closing = threading.Thread(target=close, daemon=True)
    closing.start()
    closing.join(HANGS_S / 3)
    assert not closing.is_alive(), "it waits for ever"
    assert f"the thread {name} has not ended after {END_S:g} s" in caplog.messages


def test_an_end_waits_a_limited_time_for_a_process_that_its_kill_does_not_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The kill is left out; the process ends when its pipes are closed."""
    worker = process.LimitedWorker(
        "tests.unit.worker_tasks:Tasks", {"base": 3}, process.WorkerLimits(HANGS_S, None, 2**23)
    )
    worker.start()
    assert worker._process is not None
    popen = worker._process._popen
    monkeypatch.setattr(waits, "END_S", END_S)
    monkeypatch.setattr(process, "_signal_group", lambda *_: None)
    closing = threading.Thread(target=worker.close, daemon=True)
    closing.start()
    closing.join(HANGS_S / 3)
    assert not closing.is_alive(), "it waits for ever"
    assert f"the process {popen.pid} of a worker has not ended after {END_S:g} s" in caplog.messages
    popen.wait(HANGS_S)


def test_the_engine_of_a_thread_that_hangs_is_not_closed(
    hang: Any, faked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread may be within a step, which uses the engine's arrays."""
    llm = LLM(BRIEF, **SIZES)
    closed: list[str] = []
    monkeypatch.setattr(llm.engine, "close", lambda: closed.append("closed"))
    threading.Thread(target=llm.run_on_engine, args=(hang,), daemon=True).start()
    assert hang.begun.wait(HANGS_S)
    llm.close()
    assert closed == []


def test_a_background_that_was_left_behind_goes_on_when_it_is_started(hang: Any) -> None:
    ran: list[str] = []
    may_end = threading.Event()
    background = Background([lambda: may_end.wait(HANGS_S), lambda: ran.append("next")])
    background.start()
    assert background.stop()
    background.start()
    may_end.set()
    assert background.wait(HANGS_S)
    assert ran == ["next"]


def test_a_thread_that_is_waited_for_is_named(
    hang: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waits, "PATIENCE_S", 0.0)
    thread = threading.Thread(target=hang, name="slow", daemon=True)
    thread.start()
    calls: list[int] = []
    assert not waits.has_ended(thread, lambda: calls.append(1))
    assert caplog.messages[0] == "waiting for the thread slow to end ..."
    assert calls
    monkeypatch.setattr(waits, "END_S", HANGS_S)
    assert waits.has_ended(threading.Thread())
