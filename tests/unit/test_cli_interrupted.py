"""Ctrl-C while a completion is generated or a kernel is measured: the program prints what there
is.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.brief import BRIEF
from tests.unit.serving import DEADLOCK_S

pytestmark = pytest.mark.xdist_group("llm")

# SIGINT may be ignored in what a shell starts in the background: the first line makes it as on a
# terminal.
INTERRUPTIBLE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from enginebay.cli.program import main
sys.exit(main())
"""


@pytest.mark.long
def test_ctrl_c_ends_a_generation_with_what_there_is() -> None:
    sizes = ("--decode-steps", "1", "--dtype", "float32", "--max-num-seqs", "1")
    flags = ("--model", BRIEF, "--max-tokens", "1000", "--ignore-eos", *sizes)
    command = [sys.executable, "-c", INTERRUPTIBLE, "generate", "Once upon a time", *flags]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        first = process.stdout.read(len("Once upon a time") + 8)
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=DEADLOCK_S)
    assert first.startswith("Once upon a time")
    assert process.returncode == 130
    assert not rest.endswith("\n"), "it was cut, not finished"
    lines = [line for line in err.splitlines() if not line.endswith(" ...")]  # a busy machine waits
    assert lines == [""]


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "last"),
    [
        (("bench", "kernels", "--op", "rms_norm"), "again: "),
        pytest.param(("tune", "--op", "attention"), "tables: ", marks=pytest.mark.slow),
    ],
    ids=["bench", "tune"],
)
def test_ctrl_c_ends_a_measurement_with_the_rows_that_there_are(
    command: tuple[str, ...], last: str, tmp_path: Path
) -> None:
    """Rows are printed as they come: the signal is sent when the first one was read."""
    shapes = ("--impl", "xla", "--dtype", "float32", "--shapes", "smollm2-135m/decode")
    tables = ("--tuned-folder", str(tmp_path)) if command[0] == "tune" else ()
    whole = [sys.executable, "-c", INTERRUPTIBLE, *command, *shapes, *tables]
    env = {**os.environ, "PYTHONUNBUFFERED": ""}  # a pipe keeps lines that are not flushed
    with subprocess.Popen(
        whole, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    ) as process:
        assert process.stdout is not None
        titles, row = process.stdout.readline(), process.stdout.readline()
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=DEADLOCK_S)
    assert titles.split()[:2] == ["op", "shape"]
    assert row.split()[0] == command[-1]
    assert row.split()[1].startswith("smollm2-135m/decode/b")
    assert process.returncode == 130
    assert err.endswith("\ninterrupted: these are the results so far\n")
    assert rest.splitlines()[-1].startswith(last)
