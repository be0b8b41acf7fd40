"""Tables of the program: 80 columns on a terminal with every name whole, plain lines in a pipe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from enginebay.cli import plugins
from enginebay.cli.show import print_table
from enginebay.plugins.hooks import FORMER_KINDS
from enginebay.plugins.registry import load_registry
from tests.unit.serving import DEADLOCK_S

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def on_terminal(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Runs a command whose stdout is a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
        return run(*arguments)

    return call


@pytest.fixture
def run_records(run: Run) -> Callable[..., Any]:
    return lambda *flags: json.loads(run("plugins", "--json", *flags)[1])


@pytest.mark.parametrize(
    "command", [("plugins",), ("plugins", "-v"), ("explain",), ("explain", "-v")]
)
def test_tables_fit_80_columns_and_cut_no_name(
    on_terminal: Run, config: str, command: tuple[str, ...]
) -> None:
    code, out, _ = on_terminal(*command, "--config", config)
    assert code == 0
    table = [line for line in out.splitlines() if not line.startswith("model ")]
    assert max(map(len, table)) <= 80
    assert "\x1b" not in out
    assert "…" not in out
    words = out.split()
    for name in (
        ("vinference", "no_repeat_ngram")
        if command[0] == "plugins"
        else ("kernels.attention.prefill", "fcfs")
    ):
        assert name in words
    if command[0] == "plugins":
        assert {entry.name for entry in load_registry().entries} <= set(words)


def test_reasons_are_shown_on_request(on_terminal: Run, config: str) -> None:
    assert "lower priority" not in on_terminal("explain", "--config", config)[1]
    assert "not static: lower priority" in on_terminal("explain", "-v", "--config", config)[1]
    assert "which is not here" not in on_terminal("plugins")[1]
    assert "which is not here" in on_terminal("plugins", "-v")[1]


def test_a_part_whose_device_is_not_here_is_not_ready(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def states(*flags: str) -> dict[tuple[str, str, str], str]:
        lines = [line.split() for line in run("plugins", *flags)[1].splitlines()[1:]]
        return {(line[0], line[1], line[2]): line[-1] for line in lines if len(line) == 5}

    monkeypatch.setattr(plugins, "has_device", lambda name: name == "cpu")
    assert states()["kernel", "pallas", "attention"] == "unavailable"
    assert states()["kernel", "native", "linear"] == "ready"
    assert states("--platform", "tpu")["kernel", "pallas", "attention"] == "ready"
    monkeypatch.setattr(plugins, "has_device", lambda name: name in ("cpu", "tpu"))
    assert states()["kernel", "pallas", "attention"] == "ready"


KIND_WORDS = ("processor", "format", *FORMER_KINDS)


def test_filters_leave_what_was_asked_for(run: Run, run_records: Callable[..., Any]) -> None:
    kernels = run_records("--kind", "kernel", "--platform", "tpu")
    assert {one["kind"] for one in kernels} == {"kernel"}
    assert ("pallas", "attention") in {(one["name"], one["op"]) for one in kernels}
    assert "native" not in {one["name"] for one in kernels}
    assert [one["name"] for one in run_records("--kind", "platform", "--platform", "cpu")] == [
        "cpu"
    ]
    names = {kind: {one["name"] for one in run_records("--kind", kind)} for kind in KIND_WORDS}
    assert names["logits_processor"] == names["processor"]
    assert names["tool_parser"] == names["format"] - {"think"}
    assert names["reasoning_parser"] == {"think"}
    for flags, message in (
        (("--kind", "kernels"), "Did you mean 'kernel'?"),
        (("--platform", "gpu"), "Did you mean 'cuda'?"),
    ):
        code, _, err = run("plugins", *flags)
        assert code == 2
        assert message in err


def test_a_piped_table_is_one_plain_line_for_each_row(run: Run, config: str) -> None:
    out = run("explain", "--config", config)[1]
    (line,) = [line for line in out.splitlines() if line.startswith("processors ")]
    assert "no_repeat_ngram" in line
    assert "\x1b" not in out
    assert len(run("plugins")[1].splitlines()) == len(load_registry().entries) + 2


def test_a_table_that_cannot_fit_is_wide_and_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "20")
    print_table(
        ("name", "what"), [("n" * 30, "some words that wrap")], [["a note that is wrapped too"]]
    )
    lines = capsys.readouterr().out.splitlines()
    assert "n" * 30 in lines[1]
    assert [line[32:] for line in lines[1:5]] == ["some", "words", "that", "wrap"]
    assert lines[5:] == ["    a note that is", "      wrapped too"]


def test_a_reader_that_goes_away_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as gone:
        done = subprocess.run(
            [sys.executable, "-m", "enginebay", "plugins"],
            stdout=gone,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=DEADLOCK_S,
        )
    assert (done.returncode, done.stderr) == (0, "")
