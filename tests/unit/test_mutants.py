"""Mutants are drawn from a module's text alone, and a run tells which ones the tests notice."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tools.mutations import draw

ROOT = Path(__file__).resolve().parents[2]
MODULE = b'''
"""The docstring of 1 module."""
LIMIT = 3 + 4


def clip(x: int | None, low: int = 1 + 1) -> int:
    """The larger of both, x < 0 or not."""
    assert low < 10, f"{low + 1}"
    if x is None or x < low:
        return low
    if not low:
        raise ValueError(f"{x + 1} > {100 - 1}")
    total = x
    for i, y in zip([1, 2], [3, 4][: low + 1], strict=True):
        total += y * 0
        if i == 2:
            break
    logger.info("clipped", 1 + 2)
    return total
'''

SMALLER = """
def smaller(x, y):
    if x < y:
        return x
    return y
"""
DRAINED = """
def drained(items):
    while items:
        items.pop()
"""
TESTS = {
    "test_smaller.py": (
        "from smaller import *\n\ndef test_it():\n    assert smaller(1, 2) == smaller(2, 1) == 1\n"
    ),
    "test_drained.py": "from drained import *\n\ndef test_it():\n    drained([1])\n",
}
TABLE = """
seed = 1
count = 4
packages = ["src"]
module = [
  { name = "less", path = "src/smaller.py", tests = ["test_smaller.py"] },
  { name = "loop", path = "src/drained.py", tests = ["test_drained.py"], limit_s = 2 },
]
"""


def test_the_same_text_gives_the_same_mutants_and_another_seed_others() -> None:
    assert draw(MODULE, 1, 12) == draw(MODULE, 1, 12)
    assert draw(MODULE, 1, 12) != draw(MODULE, 2, 12)
    faults = [(mutant["before"], mutant["after"]) for mutant in draw(MODULE, 1, 12)]
    moved = draw(MODULE + b"\n\ndef later() -> None:\n    pass\n", 1, 12)
    assert faults == [(mutant["before"], mutant["after"]) for mutant in moved]


def test_mutants_are_different_programs_with_one_fault_each() -> None:
    mutants = draw(MODULE, 1, 100)
    programs = {ast.dump(ast.parse(mutant["text"])) for mutant in mutants}
    assert ast.dump(ast.parse(MODULE)) not in programs
    assert len(programs) == len(mutants)
    lines = MODULE.decode().splitlines()
    for mutant in mutants:
        changed = mutant["text"].decode().splitlines()
        assert [i for i, line in enumerate(changed, 1) if line != lines[i - 1]] == [mutant["line"]]
        assert mutant["before"] == lines[mutant["line"] - 1].strip()
        assert mutant["after"] == changed[mutant["line"] - 1].strip()


def test_every_kind_of_fault_is_in_bodies_of_functions_and_in_no_message() -> None:
    after = {mutant["after"] for mutant in draw(MODULE, 1, 100)}
    assert after == {
        "if x is not None or x < low:",
        "if x is None and x < low:",
        "if x is None or x <= low:",
        "return None",
        "if low:",
        "for i, y in zip([2, 2], [3, 4][: low + 1], strict=True):",
        "for i, y in zip([1, 3], [3, 4][: low + 1], strict=True):",
        "for i, y in zip([1, 2], [4, 4][: low + 1], strict=True):",
        "for i, y in zip([1, 2], [3, 5][: low + 1], strict=True):",
        "for i, y in zip([1, 2], [3, 4][: low - 1], strict=True):",
        "for i, y in zip([1, 2], [3, 4][: low + 2], strict=True):",
        "for i, y in zip([1, 2], [3, 4][: low + 1 + 1], strict=True):",
        "total -= y * 0",
        "total += y // 0",
        "total += y * 1",
        "pass",
        "if i != 2:",
        "if i == 3:",
        "continue",
    }


def test_few_mutants_are_spread_over_lines_and_operators() -> None:
    mutants = draw(MODULE, 1, 8)
    assert len({mutant["line"] for mutant in mutants}) == 8
    operators = [mutant["operator"] for mutant in mutants]
    assert max(map(operators.count, operators)) <= 2


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Two modules, each with its tests."""
    (tmp_path / "src").mkdir()
    contents = {"src/smaller.py": SMALLER, "src/drained.py": DRAINED, "table.toml": TABLE, **TESTS}
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    return tmp_path


def run(checkout: Path, *arguments: str) -> tuple[int, str, dict[str, Any]]:
    """Exit code, what was printed, and the modules of the report."""
    command = [
        sys.executable,
        "tools/mutants.py",
        "--root",
        checkout,
        "--out",
        checkout / "report.json",
    ]
    command += ["--table", checkout / "table.toml", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return (
        done.returncode,
        done.stdout,
        json.loads((checkout / "report.json").read_text())["modules"],
    )


@pytest.mark.long
def test_a_run_tells_what_was_noticed_what_survived_and_what_never_ended(checkout: Path) -> None:
    before = sorted(checkout.rglob("*"))
    code, printed, report = run(checkout)
    assert code == 0, printed
    assert [module["without"]["outcome"] for module in report.values()] == ["survived"] * 2
    assert sorted(
        (told["line"], told["outcome"], told["by"]) for told in report["less"]["mutants"]
    ) == [
        (3, "survived", ""),  # with <= it is the same function
        (4, "killed", "test_smaller.py::test_it"),
        (5, "killed", "test_smaller.py::test_it"),
    ]
    assert [(told["after"], told["outcome"]) for told in report["loop"]["mutants"]] == [
        ("pass", "timeout")
    ]
    assert "survived: less    3 compare    if x < y:  ->  if x <= y:" in printed
    assert sorted(checkout.rglob("*")) == sorted([*before, checkout / "report.json"])


def test_tests_that_fail_without_a_mutant_are_told(checkout: Path) -> None:
    (checkout / "test_smaller.py").write_text("def test_it():\n    assert False, 'as ever'\n")
    code, printed, report = run(checkout, "--modules", "less")
    assert code == 1
    assert "tests FAIL without a mutant" in printed
    assert "as ever" in printed
    assert report["less"]["mutants"] == []


def test_the_table_names_files_that_exist() -> None:
    table = tomllib.loads((ROOT / "tools" / "mutants.toml").read_text())
    named = [path for module in table["module"] for path in (module["path"], *module["tests"])]
    assert [path for path in named if not (ROOT / path).is_file()] == []
    assert len(table["module"]) == 10
