"""A plugin's op: listed, chosen, checked and explained, without a line of ours about it; its own
tests are run by `.ci/run plugin`.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from enginebay.plugins.registry import load_registry
from enginebay_testing.cases import part_cases
from enginebay_testing.verdicts import judge
from tests.plugins.install import ROOT, command, install, python, read, visible

pytestmark = pytest.mark.xdist_group("third_party_op")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install("third_party_op", tmp_path_factory.mktemp("site"))


def test_a_new_op_touches_no_file_of_ours() -> None:
    """What serves it knows it by its registered record alone."""
    found = subprocess.run(
        ["git", "grep", "-lw", "swiglu", "--", "core", "backends", "samplers", "schedulers"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (found.returncode, found.stdout) == (1, ""), found.stdout or found.stderr


def test_the_op_is_chosen_and_explained_as_built_in_ones_are(site: Path) -> None:
    with visible(site):
        choices = {c["setting"]: c for c in read(command("explain", "--json"))["choices"]}
        named = command("explain", "--kernel", "swiglu=plein")
    assert choices["kernels.swiglu"]["chosen"] == "blocks"
    assert choices["kernels.swiglu"]["refused"] == [
        {"name": "plain", "reason": "lower priority (0)"}
    ]
    assert named.returncode == 2
    assert "Did you mean 'plain'" in named.stderr


def test_its_kernels_are_checked_and_compiled_by_its_own_kit(site: Path) -> None:
    with visible(site):
        registry = load_registry()
        entry = registry.find("kernel", "blocks", "swiglu")
        cases = part_cases(registry, entry, "run") + part_cases(registry, entry, "compile")
        names = [case.name for case in cases]
        by_hand = ("declaration_holds", "swiglu[float32]", "swiglu_32")
        assert set(by_hand) <= set(names)
        found = {case.name: judge(case.run).verdict for case in cases if case.name in by_hand}
    assert found == dict.fromkeys(by_hand, "PASS")


@pytest.mark.slow
def test_own_tests_of_the_example_pass(site: Path) -> None:
    options = ("-p", "enginebay_testing", "-p", "no:cacheprovider", "-q", "-c", "/dev/null")
    tests = ROOT / "docs" / "examples" / "third_party_op" / "tests"
    done = python(site, "-m", "pytest", *options, "--rootdir", str(site), str(tests))
    assert done.returncode == 0, done.stdout + done.stderr
