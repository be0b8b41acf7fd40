"""Log lines: outside text begins no line of its own and colours no terminal."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
from typing import Any

import pytest

from enginebay.cli.program import OneLineFormatter, main, one_line

FORGED = "x\n2026-11-27 00:00:00,000 enginebay.server INFO id=z status=200"


@pytest.fixture
def log() -> tuple[logging.Logger, io.StringIO]:
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(OneLineFormatter("%(levelname)s %(message)s"))
    made = logging.Logger("test")  # noqa: LOG001  # a logger of this test alone
    made.addHandler(handler)
    return made, written


@pytest.mark.parametrize(
    "text", [FORGED, "\x1b[31mred", "\r", "\u2028", "\u202e", "\x00", "\x85", "\ud800", "é ü 中"]
)
def test_a_message_is_one_printable_line(
    log: tuple[logging.Logger, io.StringIO], text: str
) -> None:
    logger, written = log
    logger.warning("path=%s", text)
    line = written.getvalue()
    assert line.endswith("\n")
    assert line[:-1].isprintable()
    assert text == "é ü 中" or text not in line


def test_every_command_writes_its_log_as_such_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    set_up: dict[str, Any] = {}
    monkeypatch.setattr(logging, "basicConfig", set_up.update)
    assert main(["plugins"]) == 0
    assert [type(handler.formatter) for handler in set_up["handlers"]] == [OneLineFormatter]


def test_what_is_printable_is_unchanged() -> None:
    assert one_line("é ü 中 \\n") == "é ü 中 \\n"


def test_lines_of_a_traceback_are_indented(log: tuple[logging.Logger, io.StringIO]) -> None:
    logger, written = log
    try:
        raise ValueError(FORGED)
    except ValueError:
        logger.exception("failed")
    first, *others = written.getvalue().splitlines()
    assert first == "ERROR failed"
    assert all(line.startswith("  ") for line in others)


def test_a_text_that_stdout_cannot_encode_is_read_and_escaped() -> None:
    code = "from enginebay.cli.program import _show_any_text as show; show(); "
    code += "print(input())"
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command,
        input="caf\u00e9 \u4e2d\n".encode(),
        capture_output=True,
        check=True,
        env={"PYTHONIOENCODING": "ascii", "PYTHONPATH": ":".join(sys.path)},
    )
    assert done.stdout == b"caf\\xe9 \\u4e2d\n"
