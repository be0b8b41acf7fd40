"""Help, `plugins` and `config` import neither JAX nor the libraries that a few requests need."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("jax", "jaxlib", "flax", "transformers", "tokenizers", "fastapi", "torch")

PROGRAM = f"""
import contextlib, io, sys
from enginebay.cli.program import find_commands, main

def run(*arguments):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main(list(arguments))
    assert out.getvalue(), arguments
    found = [name for name in {HEAVY!r} if name in sys.modules]
    assert not found, f"{{arguments}} imported {{found}}"

run("--help")
for name in find_commands().names("command"):
    run(name, "--help")
run("config")
run("plugins")
"""


@pytest.mark.long
def test_help_and_lists_import_no_jax() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
