"""A later process traces, lowers and compiles nothing, and its tokens are the same."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from enginebay_runtime.layered import MIN_LAYERS
from tests.brief import ROOT, TINY
from tests.unit.checkpoints import model_of, random_tensors, write


def begin(*arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.unit.counted_start", *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def result(process: subprocess.Popen[str]) -> Any:
    printed, _ = process.communicate(timeout=600)
    assert process.returncode == 0
    return json.loads(printed.splitlines()[-1])


def stored(cache: Path) -> dict[str, int]:
    """The files of programs; one that is written again is another file."""
    return {path.name: path.stat().st_ino for path in (cache / "steps").iterdir()}


@pytest.mark.long
@pytest.mark.parametrize("engine", ["oengine", "vinference", "esurge"])
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


@pytest.mark.long
def test_a_later_process_compiles_no_layered_step_and_no_step_with_a_processor(
    tmp_path: Path,
) -> None:
    """It starts by its first programs, which are in parts, and makes the others beside them."""
    tmp_path.chmod(0o700)
    fields = {"num_hidden_layers": MIN_LAYERS, "vocab_size": 96}
    write(tmp_path / "model", random_tensors(model_of(**fields)), **fields)
    shutil.copy(Path(TINY) / "tokenizer.json", tmp_path / "model")
    given = tmp_path / "cache", "oengine", tmp_path / "model"
    given[0].mkdir(mode=0o700)
    first = result(begin(*given))
    assert first["num_layered"] > 0
    made = stored(given[0])
    later = result(begin(*given))
    assert later["events"] == {}
    assert stored(given[0]) == made, "another process has compiled for it"
    assert later["tokens"] == first["tokens"]
