"""check, tune and bench kernels take "module:attribute" where they take a kernel's name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from enginebay_testing.verdicts import Outcome

Run = Callable[..., tuple[int, str, str]]
PATH = "tests.unit.unregistered:scaled_linear"
SHAPE = ("--shapes", "smollm2-135m/decode/b1/c64", "--rounds", "1", "--dtype", "float32")


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """No trial in a process of its own: test_cheats.py has these."""
    passed = Outcome("PASS")
    monkeypatch.setattr("enginebay_testing.kernel_trial.tried_apart", lambda _: passed)


@pytest.mark.long
@pytest.mark.usefixtures("tried")
def test_bench_kernels_measures_it(run: Run) -> None:
    flags = ("--op", "attention", "--impl", "xla,tests.unit.unregistered:plain_attention")
    code, out, err = run("bench", "kernels", *flags, *SHAPE, "--json")
    assert code == 0, err
    assert "tests.unit.unregistered:plain_attention" in out


@pytest.mark.usefixtures("tried")
@pytest.mark.long
def test_tune_takes_it(run: Run, tmp_path: Path) -> None:
    flags = ("--impl", "tests.unit.unregistered:plain_attention", "--tuned-folder", str(tmp_path))
    code, out, err = run("tune", *flags, *SHAPE)
    assert code == 0, err
    assert "plain_attention" in out


def test_check_finds_the_wrong_one(run: Run) -> None:
    code, out, err = run("check", f"kernel:linear:{PATH}", "--first-failure", "--json")
    assert code == 1, err
    assert "INCORRECT" in {record["verdict"] for record in json.loads(out)}


@pytest.mark.parametrize(
    "words",
    [
        ("check", "kernel:linear:tests.unit.unregistered:absent"),
        ("bench", "kernels", "--op", "linear", "--impl", "tests.unit.unregistered:absent"),
        ("tune", "--op", "linear", "--impl", "tests.unit.unregistered:absent"),
    ],
)
def test_a_path_that_is_not_there_is_wrong_input(run: Run, words: tuple[str, ...]) -> None:
    code, _, err = run(*words)
    assert code == 2
    assert "tests.unit.unregistered has no 'absent'" in err
