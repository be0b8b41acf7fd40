"""A later process traces, lowers and compiles nothing, and its tokens are the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.brief import ROOT


def begin(folder: Path, engine: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.unit.counted_start", str(folder), engine],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def result(process: subprocess.Popen[str]) -> Any:
    printed, _ = process.communicate(timeout=600)
    assert process.returncode == 0
    return json.loads(printed.splitlines()[-1])


@pytest.mark.long
@pytest.mark.parametrize("engine", ["oengine", "vinference"])
def test_a_later_process_traces_lowers_and_compiles_nothing(engine: str, tmp_path: Path) -> None:
    """The first two processes start at once and share the cache."""
    tmp_path.chmod(0o700)
    first, other = map(result, [begin(tmp_path, engine) for _ in range(2)])
    assert set(first["events"]) == {"traced", "lowered", "compiled"}
    assert other["tokens"] == first["tokens"]
    assert {path.suffix for path in (tmp_path / "steps").iterdir()} == {".program"}
    later = result(begin(tmp_path, engine))
    assert later["events"] == {}
    assert later["tokens"] == first["tokens"]
