"""`make gpu-check` without a GPU: the same script and stages, on small shapes."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def run(repo_root: Path, tmp_path: Path, *arguments: str) -> tuple[int, str, dict[str, Any]]:
    report = tmp_path / "figures.json"
    script = repo_root / "tools" / "gpu_check" / "run.py"
    command = [sys.executable, str(script), "--installed", "--tiny", "--json", str(report), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=repo_root)
    return (
        done.returncode,
        done.stdout + done.stderr,
        json.loads(report.read_text()) if report.exists() else {},
    )


def test_stream_and_kernel_are_measured(repo_root: Path, tmp_path: Path) -> None:
    code, text, report = run(repo_root, tmp_path, "--stages", "stream,kernel")
    assert code == 0, text
    figures = {figure["figure"]: figure for figure in report["figures"]}
    assert any("read-only stream" in name and figure["value"] > 0 for name, figure in figures.items())
    assert figures["xla decode attention, 2 rows of 128"]["fraction"] > 0
    assert "| kernel | xla decode attention, 2 rows of 128 |" in text


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen3-0.6b", "llama-3.1-8b"])
def test_engines_are_measured_on_models_of_both_families(repo_root: Path, tmp_path: Path, model: str) -> None:
    work = ("--stages", "engines,torch", "--models", model, "--batches", "1,2")
    code, text, report = run(repo_root, tmp_path, *work)
    assert code == 0, text
    rates = [figure for figure in report["figures"] if figure.get("fraction") is not None]
    assert len(rates) == 4, report  # two engines, two batches
    assert all(figure["value"] > 0 for figure in rates)


LISTING = """000: kCommandBuffer [source       | next=021 (1)]
    001: kCopy         [source        | sink        ] kCopy
021: kWhile         [prev=000 (1) | next=199 (1)]
    000: kCommandBuffer [source       | next=160 (1)]
        034: kCustomCall   [prev=033 (1) | next=035 (1)] kCustomCall
    160: kConditional   [prev=000 (1) | next=000 (1)]
        000: kCommandBuffer [source       | next=158 (1)]
199: kCustomKernel  [prev=021 (1) | sink        ] fusion
"""


def test_graphs_of_a_step_are_counted_in_xlas_listing(
    repo_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(repo_root / "tools" / "gpu_check"))
    script = importlib.import_module("run")
    assert script.count_graphs(LISTING) == (1, 1)  # the loop's body: a graph, and what it branches over
    assert script.count_graphs(LISTING.replace("kWhile", "kSequential")) == (1, 2)
    monkeypatch.delitem(sys.modules, "run")


def test_a_stage_that_does_not_end_is_told_of_and_fails(repo_root: Path, tmp_path: Path) -> None:
    code, text, report = run(repo_root, tmp_path, "--stages", "stream", "--timeout", "0.01")
    assert code == 1
    assert report["failed"] == ["stream: not done after 0.01 s"]
    assert "FAILED  stream" in text


def test_a_stage_that_is_none_is_refused(repo_root: Path, tmp_path: Path) -> None:
    code, text, _ = run(repo_root, tmp_path, "--stages", "strem")
    assert code == 2
    assert "strem" in text
