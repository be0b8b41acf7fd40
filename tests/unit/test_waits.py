"""Whoever waits for more than two seconds is told what for: on the logger, as plain lines, or as
bars; and Ctrl-C in a bench.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from enginebay import LLM, waits
from enginebay.cli.generate import after_first
from enginebay.cli.show import PlainProgress, count_text, progress
from enginebay.cli.waiting import plain_waits
from enginebay.compose import composition
from enginebay.compose.plan import make_title
from enginebay.contracts.compilations import Compilations
from enginebay.errors import UnsupportedError
from enginebay.outputs import StreamChunk
from enginebay.serving import llm
from enginebay.waits import waiting
from enginebay_esurge import opening
from enginebay_native import compiling
from enginebay_runtime import local
from enginebay_vinference import state_steps
from tests.unit.serving import DEADLOCK_S

Run = Callable[..., tuple[int, str, str]]


class Kept(logging.Handler):
    """Keeps records, and says when the first one came."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.came = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        self.came.set()


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kept]:
    """The records of waits of any length."""
    monkeypatch.setattr(waits, "PATIENCE_S", 0.0)
    handler, level = Kept(), waits.log.level
    waits.log.addHandler(handler)
    waits.log.setLevel(logging.INFO)
    yield handler
    waits.log.removeHandler(handler)
    waits.log.setLevel(level)


def test_a_wait_is_named_and_its_end_is_too(kept: Kept) -> None:
    with waiting("compiling a lot"):
        assert kept.came.wait(DEADLOCK_S)
    begin, *_, end = kept.records
    assert (begin.levelname, begin.getMessage()) == ("WARNING", "compiling a lot ...")
    assert end.levelname == "INFO"
    assert end.getMessage().startswith("compiling a lot took ")
    assert begin.wait_key is end.wait_key  # type: ignore[attr-defined]
    assert (begin.wait_ended, end.wait_ended) == (False, True)  # type: ignore[attr-defined]


def test_what_takes_no_time_is_not_named(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "PATIENCE_S", 3600.0)
    with pytest.raises(ValueError, match="of the block"), waiting("a moment"):
        raise ValueError("of the block")
    assert kept.records == []
    assert not [thread for thread in threading.enumerate() if thread.name == "enginebay-wait"]


def test_a_long_wait_is_named_again(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "REPEAT_S", 0.01)
    with waiting("a long one"):
        end_s = time.monotonic() + DEADLOCK_S
        while len(kept.records) < 3 and time.monotonic() < end_s:
            time.sleep(0.01)
    assert kept.records[1].getMessage().startswith("a long one ... (")


def test_a_program_that_configures_no_logging_shows_it_on_stderr(
    kept: Kept, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with plain_waits("warning"), waiting("a wait"):
        end_s = time.monotonic() + DEADLOCK_S
        err = ""
        while not err and time.monotonic() < end_s:
            err = capsys.readouterr().err
    assert err == "enginebay: a wait ...\n"
    with plain_waits("error"), waiting("a wait"):
        time.sleep(0.05)
    assert capsys.readouterr().err == ""


def test_compiling_cpp_names_the_kernel_and_the_compiler(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "sh")

    def compile_slowly(*_: Any) -> None:
        assert kept.came.wait(DEADLOCK_S)
        raise UnsupportedError("that is all")

    monkeypatch.setattr(compiling, "_compile", compile_slowly)
    with pytest.raises(UnsupportedError, match="that is all"):
        compiling.library("linear_f32")
    assert (
        kept.records[0].getMessage().startswith("compiling the C++ kernel linear_f32 with sh, once")
    )


def test_each_wait_of_an_engine_says_what_for(
    monkeypatch: pytest.MonkeyPatch, fake_llm: LLM
) -> None:  # holds X16
    said: list[str] = []

    @contextlib.contextmanager
    def noted(what: str) -> Iterator[None]:
        said.append(what)
        yield
        said.append("end")

    for module in (composition, llm, opening, state_steps, local):
        monkeypatch.setattr(module, "waiting", noted)
    plan, title = fake_llm.plan, make_title(fake_llm.plan)

    def done(*_: Any, **__: Any) -> list[Any]:
        said.append("it")
        return []

    monkeypatch.setattr(type(plan.checkpoint), "load_weights", done)
    composition.make_parts(plan).load_weights()
    monkeypatch.setattr(fake_llm.engine, "warmup", lambda _: len(done()))
    fake_llm.warmup()
    monkeypatch.setattr(
        opening,
        "build",
        lambda _: SimpleNamespace(
            engine=SimpleNamespace(begin_warmup=done, compilations=Compilations())
        ),
    )
    opening.load_engine(plan, waits.log, logging.DEBUG, compiles=True)
    monkeypatch.setattr(
        local, "StepCompiler", lambda *_, **__: SimpleNamespace(missing=lambda _: [], joined=done)
    )
    monkeypatch.setattr(local, "StepSource", SimpleNamespace(of=lambda _: None))
    owner: Any = SimpleNamespace(
        _programs={},
        _has_layered=False,
        layouts={},
        compilations=Compilations(),
        title=title,
    )
    local.LocalExecutor._compiled(owner, "a step")  # type: ignore[arg-type]
    owner = SimpleNamespace(
        engine=SimpleNamespace(parts=SimpleNamespace(title=title), compilations=Compilations()),
        steps=lambda *_: None,
        jitted=lambda *_, **__: SimpleNamespace(lower=lambda *_: None),
        describe=lambda *_: (),
        compile_lowered=done,
    )
    state_steps.Programs._compile(owner, "a shape", None)  # type: ignore[arg-type]
    assert said == [
        word
        for what in (
            f"loading the weights of {plan.checkpoint.folder}",
            f"compiling every step of {title}",
            f"compiling the largest steps of {title}",
            f"compiling a step, for {title}",
            f"compiling a shape, for {title}",
        )
        for word in (what, "it", "end")
    ]


def test_progress_that_is_not_on_a_terminal_is_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with progress() as report:
        report("loading weights", 1, 3)
    assert capsys.readouterr().err == "", "a moment"
    monkeypatch.setattr(waits, "PATIENCE_S", -1.0)
    plain = PlainProgress()
    plain.report("compiling", 1, 3)
    plain.report("compiling", 2, 3)
    assert capsys.readouterr().err == "enginebay: compiling: 1 of 3\n", (
        "the next line comes REPEAT_S later"
    )


def test_a_count_of_bytes_is_shown_in_megabytes() -> None:
    assert count_text(3, 21) == "3 of 21"
    assert count_text(12_400_000, 1_098_000_000) == "12 of 1,098 MB"


def test_bars_on_a_terminal_show_counts_and_the_time_that_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = io.StringIO()
    screen.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with progress() as report:
        for done in (1, 2, 3):
            report("compiling", done, 9)
            time.sleep(0.01)
        end_s = time.monotonic() + DEADLOCK_S
        left = re.compile(r"3 of 9 +\d\d:\d\d +compiling")
        plain = ""
        while not left.search(plain) and time.monotonic() < end_s:
            plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue())
            time.sleep(0.02)
    assert left.search(plain), plain


def test_bars_on_a_terminal_name_what_is_waited_for(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()
    screen.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with progress() as report:
        report("loading weights", 1, 3)
        with waiting("compiling decode 8 rows, for engine vinference, attention native"):
            end_s = time.monotonic() + DEADLOCK_S
            while "attention native" not in screen.getvalue() and time.monotonic() < end_s:
                time.sleep(0.02)
            assert (
                "compiling decode 8 rows, for engine vinference, attention native"
                in screen.getvalue()
            )
        drawn = "attention native"  # a frame that was being drawn when the wait ended has it
        while (not drawn or "attention native" in drawn) and time.monotonic() < end_s:
            screen.seek(0)
            screen.truncate()
            time.sleep(0.15)
            drawn = screen.getvalue()
        screen.seek(0)
        screen.truncate()
        report("measuring", 1, 2)
    assert "measuring" in screen.getvalue()
    assert "attention native" not in screen.getvalue(), "the bar of a wait that ended is gone"


def test_bars_end_when_the_first_chunk_is_there() -> None:
    calls: list[str] = []
    chunks = [StreamChunk("r", 0, text, (1,)) for text in "ab"]
    for chunk in after_first(chunks, lambda: calls.append("closed")):
        calls.append(chunk.delta_text)
    assert calls == ["closed", "a", "b"]
    assert list(after_first([], lambda: calls.append("closed"))) == []
    assert calls[-1] == "closed"


def test_the_level_info_leaves_out_which_devices_jax_did_not_find() -> None:
    words = ("import logging, sys; from enginebay.cli.program import main; main(['env', '--json', "
             "'--log-level', sys.argv[1]]); print(logging.getLogger('jax._src.xla_bridge')"
             ".isEnabledFor(logging.INFO))")  # fmt: skip
    for level, says in (("info", "False"), ("debug", "True")):
        done = subprocess.run(
            [sys.executable, "-c", words, level], capture_output=True, text=True, check=True
        )
        assert done.stdout.splitlines()[-1] == says
        assert ("Unable to initialize" in done.stderr) <= (level == "debug")
