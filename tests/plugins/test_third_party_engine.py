"""A plugin's engine: listed, chosen, and planned by what it says of its steps, without a line of
ours about it; its own tests are run by `.ci/run plugin`.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.plugins.install import EXAMPLES, ROOT, command, install, python, read, visible

pytestmark = pytest.mark.xdist_group("third_party_engine")
FOLDER = EXAMPLES / "third_party_engine"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install("third_party_engine", tmp_path_factory.mktemp("site"))


def test_a_new_engine_is_at_most_150_lines_and_touches_no_file_of_ours() -> None:
    files = (FOLDER / "enginebay_ring").glob("*.py")
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files) <= 150
    words = ["git", "grep", "-l", "enginebay_ring", "--", "core", "backends"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, ""), done.stdout or done.stderr


def test_the_engine_is_explained_and_its_options_are_checked(site: Path) -> None:
    sizes = ("--max-model-len", "256", "--max-num-seqs", "4", "--json")
    with visible(site):
        choices = read(command("explain", "--engine", "ring", *sizes))["choices"]
        wrong = command("explain", "--engine", "ring", "--set", "engine.block_size=7")
        auto = read(command("explain", *sizes))["choices"]
    assert {c["setting"]: c["chosen"] for c in choices}["engine"] == "ring"
    assert wrong.returncode == 2
    assert "block_size" in wrong.stderr
    assert {c["setting"]: c["chosen"] for c in auto}["engine"] != "ring"


@pytest.mark.slow
def test_own_tests_of_the_example_pass(site: Path) -> None:
    options = ("-p", "enginebay_testing", "-p", "no:cacheprovider", "-q", "-c", "/dev/null")
    done = python(site, "-m", "pytest", *options, "--rootdir", str(site), str(FOLDER / "tests"))
    assert done.returncode == 0, done.stdout + done.stderr
