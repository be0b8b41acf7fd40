"""tools/test_all.py: the parts of `make test-all`, and the table that they write into
docs/testing.md.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def tool(repo_root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "test_all_tool", repo_root / "tools" / "test_all.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, spec.name, module)
        spec.loader.exec_module(module)
    return module


@pytest.fixture
def root(tmp_path: Path, tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a Makefile of two goals and a page without rows."""
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "testing.md"
    page.write_text(f"# Testing\n\n{tool.BEGIN}\n{tool.END}\n\nAfter it.\n")
    good = 'good:\n\t@echo "===== 7 passed, 2 skipped in 1.50s ====="\n'
    (tmp_path / "Makefile").write_text(
        good + 'bad:\n\t@echo "=== 1 failed, 6 passed in 9.01s ==="; exit 3\n'
    )
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *arguments], cwd=tmp_path, check=True)
    parts = (
        tool.Part("fine", ("good", "good"), "what is fine"),
        tool.Part("broken", ("bad", "good"), "what is broken"),
        tool.Part("absent", ("good",), "what is not there", ("no-such-program-anywhere",)),
    )
    for name, value in (("ROOT", tmp_path), ("PAGE", page), ("PARTS", parts)):
        monkeypatch.setattr(tool, name, value)
    return tmp_path


def rows(tool: ModuleType, root: Path) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = tool.read_rows((root / "docs" / "testing.md").read_text())
    return found


def test_each_part_writes_its_row_and_one_that_fails_is_the_exit_code(
    tool: ModuleType, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main(["fine"]) == 0
    commit, date, minutes, outcome = rows(tool, root)["fine"]
    assert re.fullmatch(r"[0-9a-f]{10}", commit)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", date)
    assert (minutes, outcome) == ("0", "7 passed, 2 skipped; 7 passed, 2 skipped")
    assert rows(tool, root)["broken"] == tool.NEVER
    assert tool.main(["broken"]) == 1
    assert rows(tool, root)["broken"][3] == "FAILED in `make bad` (exit code 2): 1 failed, 6 passed"
    assert rows(tool, root)["fine"][3] == outcome, "the row of another part stays"
    assert (root / "docs" / "testing.md").read_text().endswith("\n\nAfter it.\n")
    assert "7 passed" in capsys.readouterr().out


def test_a_part_without_its_program_is_skipped_by_name_and_keeps_its_row(
    tool: ModuleType, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tool.write_row("absent", ("0123456789", "2026-01-01", "3", "7 passed"))
    assert tool.main(["absent"]) == 0
    assert (
        "absent     skipped: no-such-program-anywhere is not installed" in capsys.readouterr().out
    )
    assert rows(tool, root)["absent"] == ("0123456789", "2026-01-01", "3", "7 passed")


def test_changes_that_are_not_committed_are_marked(tool: ModuleType, root: Path) -> None:
    (root / "Makefile").write_text((root / "Makefile").read_text() + "\n")
    assert tool.main(["fine"]) == 0
    assert rows(tool, root)["fine"][0].endswith("+")


def test_a_name_that_is_no_part_is_refused(
    tool: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main(["slow", "typo"]) == 2
    assert "no part typo; the parts are slow," in capsys.readouterr().err


def test_every_part_is_a_goal_of_the_makefile_and_a_row_of_the_page(
    tool: ModuleType, repo_root: Path
) -> None:
    goals = set(re.findall(r"^([a-z-]+):", (repo_root / "Makefile").read_text(), re.MULTILINE))
    assert {goal for part in tool.PARTS for goal in part.goals} <= goals
    assert set(tool.read_rows((repo_root / "docs" / "testing.md").read_text())) == {
        part.name for part in tool.PARTS
    }
