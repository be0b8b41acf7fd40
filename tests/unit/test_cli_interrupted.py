"""Ctrl-C while a completion is generated: the program prints what there is."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.brief import BRIEF
from tests.unit.serving import DEADLOCK_S

pytestmark = pytest.mark.xdist_group("llm")

# SIGINT may be ignored in what a shell starts in the background: the first line makes it as on a
# terminal.
INTERRUPTIBLE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from enginebay.cli.main import main
sys.exit(main())
"""


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
    assert err == "\n"
