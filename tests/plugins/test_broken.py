"""Broken plugins: each is listed with its reason, picking one raises it, and everything else goes
on working.
"""

from __future__ import annotations

from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from tests.brief import BRIEF
from tests.fakes import install as install_fakes
from tests.plugins.install import command, install, listed, parts, visible

pytestmark = pytest.mark.xdist_group("broken")

WHOLE = {
    "broken_import": (
        "ModuleNotFoundError: No module named 'enginebay_broken.a_module_that_nobody_wrote'"
    ),
    "broken_signature": (
        "Argument(s) {'registry'} are declared in the hookimpl but can not be found"
    ),
    "broken_hook_name": "unknown hook 'register_scheduler'",
    "broken_no_hook": "it implements no hook of enginebay",
    "broken_register": "RuntimeError: the hook went wrong half way",
}
PARTS = {
    "from_yesterday": (
        "broken",
        "written for version 0 of the scheduler interface; this enginebay has version 1",
    ),
    "fcfs": ("broken", "the name is already taken by plugin 'schedulers'"),
    "needs_more": ("unavailable", "needs a_module_that_nobody_has"),
    "no_such_target": ("ready", ""),
    "good_among_wrong": ("ready", ""),
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install("broken", tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def records(site: Path) -> list[dict[str, Any]]:
    return listed(site)


def test_plugins_that_cannot_be_loaded_are_listed_with_their_reasons(
    records: list[dict[str, Any]],
) -> None:
    plugins = {r["name"]: r for r in records if r["kind"] == "plugin"}
    assert plugins.keys() == WHOLE.keys()
    for name, reason in WHOLE.items():
        assert plugins[name]["state"] == "broken"
        assert reason in plugins[name]["reason"]
    assert not [r for r in records if r["package"] in WHOLE and r["kind"] != "plugin"]


def test_wrong_parts_are_listed_beside_the_good_ones_of_their_plugin(
    records: list[dict[str, Any]],
) -> None:
    found = [r for r in records if r["package"] == "broken_parts"]
    assert {r["name"] for r in found} == PARTS.keys()
    for record in found:
        state, reason = PARTS[record["name"]]
        assert record["state"] == state
        assert reason in record["reason"]


def test_everything_else_stays_as_it_is(records: list[dict[str, Any]]) -> None:
    built_in = [r for r in records if r["distribution"] == "enginebay"]
    assert built_in == parts()
    others = [r for r in built_in if r["state"] != "ready"]
    assert {r["state"] for r in others} <= {"unavailable"}
    assert all("triton" in r["reason"] or "which is not here" in r["reason"] for r in others), (
        "the extra gpu, or a device"
    )


Picked = dict[str, CompletedProcess[str]]


@pytest.fixture(scope="module")
def picked(site: Path) -> Picked:
    """What `generate --scheduler NAME` says, on the fake engine."""
    names = [*WHOLE, *PARTS, "broken_parts/fcfs", "one_at_a_time", "one_at_a_tim"]
    flags = (
        "--model",
        BRIEF,
        "--prompt-ids",
        "5,6,7",
        "--max-tokens",
        "3",
        "--json",
        "--ignore-eos",
    )
    with visible(site), pytest.MonkeyPatch.context() as patch:
        install_fakes(patch)
        return {name: command("generate", *flags, "--scheduler", name) for name in names}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        *((name, reason) for name, reason in WHOLE.items()),
        *((name, PARTS[name][1]) for name in ("from_yesterday", "needs_more")),
        ("broken_parts/fcfs", PARTS["fcfs"][1]),
        ("no_such_target", "has no attribute 'TwoAtATime'"),
    ],
)
def test_picking_a_broken_one_raises_its_reason(picked: Picked, name: str, reason: str) -> None:
    done = picked[name]
    assert (done.returncode, done.stdout) == (2, "")
    assert reason in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["fcfs", "one_at_a_time", "good_among_wrong"])
def test_the_others_keep_working(picked: Picked, name: str) -> None:
    done = picked[name]
    assert done.returncode == 0
    assert done.stdout == done.stdout.strip() + "\n"
    assert '"finish_reason": "length"' in done.stdout


def test_a_misspelt_name_is_told_with_the_nearest(picked: Picked) -> None:
    done = picked["one_at_a_tim"]
    assert done.returncode == 2
    assert "Did you mean 'one_at_a_time'?" in done.stderr


def test_the_variable_restricts_what_is_loaded(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with visible(site):
        monkeypatch.setenv("ENGINEBAY_PLUGINS", "schedulers,good_beside")
        records = parts()
    assert {r["package"] for r in records} == {"schedulers", "good_beside"}
    assert {r["state"] for r in records} == {"ready"}


def test_a_misspelt_name_in_the_variable_is_an_error(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with visible(site):
        monkeypatch.setenv("ENGINEBAY_PLUGINS", "schedulers,good_besid")
        done = command("plugins")
    assert done.returncode == 2
    assert "unknown plugin 'good_besid'" in done.stderr
    assert "Did you mean 'good_beside'?" in done.stderr
    assert "Traceback" not in done.stderr
