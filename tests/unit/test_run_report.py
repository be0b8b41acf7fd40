"""The report that closes each run: programs are counted once, by file, and too many of them fail a
whole run.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import run_report

SUITE = """
import jax
import numpy as np
import pytest

@pytest.mark.parametrize("size", [{sizes}])
def test_a_program(size):
    assert jax.jit(lambda x: x + 41)(np.zeros(size, np.float32)).shape == (size,)
"""
CONFTEST = """
import os
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
from tests import run_report
run_report.MAX_PROGRAMS, run_report.MARGIN = {budget}, 0

def pytest_configure(config):
    config.pluginmanager.register(run_report.RunReport(config))
"""


def run(folder: Path, root: Path, budget: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST.format(budget=budget))
    (folder / "test_one.py").write_text(SUITE.format(sizes="3, 5"))
    (folder / "test_two.py").write_text(SUITE.format(sizes="3, 5, 7"))
    ini = f"[pytest]\ntestpaths = .\npythonpath = {root}\nmarkers = slow\n matrix\n"
    (folder / "pytest.ini").write_text(ini)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-n",
        "2",
        "--dist",
        "loadfile",
    ]
    return subprocess.run(
        [*command, "-m", run_report.WHOLE_SUITE, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.long
def test_programs_of_two_processes_are_counted_once_and_too_many_fail(
    tmp_path: Path, repo_root: Path
) -> None:
    done = run(tmp_path, repo_root, 2)
    assert "3 distinct programs" in done.stdout, done.stdout
    assert "FAILED: 3 programs, of at most 2" in done.stdout
    assert (done.returncode, "5 passed" in done.stdout.splitlines()[-1]) == (1, True)


def test_make_test_is_a_whole_run(repo_root: Path) -> None:
    done = subprocess.run(
        ["make", "--dry-run", "test"], cwd=repo_root, capture_output=True, text=True, check=True
    )
    assert f'-m "{run_report.WHOLE_SUITE}"' in done.stdout


@pytest.mark.parametrize(
    ("budget", "count", "fails"), [(10, 10, False), (10, 11, False), (10, 12, True)]
)
def test_a_run_may_have_a_few_more(
    monkeypatch: pytest.MonkeyPatch, budget: int, count: int, fails: bool
) -> None:
    monkeypatch.setattr(run_report, "MAX_PROGRAMS", budget)
    monkeypatch.setattr(run_report, "MARGIN", 1)
    lines = list(run_report.report({str(i): "file" for i in range(count)}, is_whole=True))
    assert lines[-1].startswith("FAILED") == fails
    assert not list(run_report.report({str(i): "" for i in range(count)}, is_whole=False))[
        -1
    ].startswith("FAILED")
