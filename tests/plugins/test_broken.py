"""Broken plugins: each is listed with its reason, picking one raises it, and everything else goes on working."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plugins.install import install, listed, python, run

pytestmark = pytest.mark.xdist_group("broken")

WHOLE = {
    "broken_import": "ModuleNotFoundError: No module named 'enginebay_broken.a_module_that_nobody_wrote'",
    "broken_signature": "Argument(s) {'registry'} are declared in the hookimpl but can not be found",
    "broken_hook_name": "unknown hook 'register_scheduler'",
    "broken_no_hook": "it implements no hook of enginebay",
    "broken_register": "RuntimeError: the hook went wrong half way",
}
PARTS = {
    "from_yesterday": ("broken", "written for version 0 of the scheduler interface, this is version 1"),
    "fcfs": ("broken", "the name is already taken by plugin 'schedulers'"),
    "needs_more": ("unavailable", "needs a_module_that_nobody_has"),
    "no_such_target": ("ready", ""),
    "good_among_wrong": ("ready", ""),
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install("broken", tmp_path_factory.mktemp("site"))


def test_plugins_that_cannot_be_loaded_are_listed_with_their_reasons(site: Path) -> None:
    records = listed(site)
    plugins = {r["name"]: r for r in records if r["kind"] == "plugin"}
    assert plugins.keys() == WHOLE.keys()
    for name, reason in WHOLE.items():
        assert plugins[name]["state"] == "broken"
        assert reason in plugins[name]["reason"]
    assert not [r for r in records if r["package"] in WHOLE and r["kind"] != "plugin"]


def test_wrong_parts_are_listed_beside_the_good_ones_of_their_plugin(site: Path) -> None:
    records = [r for r in listed(site) if r["package"] == "broken_parts"]
    assert {r["name"] for r in records} == PARTS.keys()
    for record in records:
        state, reason = PARTS[record["name"]]
        assert record["state"] == state
        assert reason in record["reason"]


def test_everything_else_stays_as_it_is(site: Path, tmp_path: Path) -> None:
    built_in = [r for r in listed(site) if r["distribution"] == "enginebay"]
    assert built_in == listed(tmp_path)
    others = [r for r in built_in if r["state"] != "ready"]
    assert all(r["state"] == "unavailable" and "triton" in r["reason"] for r in others), "the extra gpu alone"


PICK = """
import contextlib, io, json, sys
from enginebay.cli.main import main

results = {}
for name in sys.argv[1:]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["generate", "--prompt-ids", "5,6,7", "--max-tokens", "3", "--max-model-len", "256",
                     "--max-num-seqs", "4", "--json", "--ignore-eos", "--scheduler", name])
    results[name] = (code, out.getvalue(), err.getvalue())
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def picked(site: Path) -> dict[str, tuple[int, str, str]]:
    """Exit code, output and error of `generate --scheduler NAME`, in one process for all names."""
    import json

    names = [*WHOLE, *PARTS, "broken_parts/fcfs", "one_at_a_time", "one_at_a_tim"]
    done = python(site, "-c", PICK, *names)
    assert done.returncode == 0, done.stderr
    results: dict[str, tuple[int, str, str]] = json.loads(done.stdout)
    return results


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        *((name, reason) for name, reason in WHOLE.items()),
        *((name, PARTS[name][1]) for name in ("from_yesterday", "needs_more")),
        ("broken_parts/fcfs", PARTS["fcfs"][1]),
        ("no_such_target", "has no attribute 'TwoAtATime'"),
    ],
)
def test_picking_a_broken_one_raises_its_reason(
    picked: dict[str, tuple[int, str, str]], name: str, reason: str
) -> None:
    code, out, err = picked[name]
    assert (code, out) == (2, "")
    assert reason in err
    assert "Traceback" not in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", ["fcfs", "one_at_a_time", "good_among_wrong"])
def test_the_others_keep_working(picked: dict[str, tuple[int, str, str]], name: str) -> None:
    code, out, _ = picked[name]
    assert code == 0
    assert out == out.strip() + "\n"
    assert '"finish_reason": "length"' in out


def test_a_misspelt_name_is_told_with_the_nearest(picked: dict[str, tuple[int, str, str]]) -> None:
    code, _, err = picked["one_at_a_tim"]
    assert code == 2
    assert "Did you mean 'one_at_a_time'?" in err


def test_the_variable_restricts_what_is_loaded(site: Path) -> None:
    records = listed(site, ENGINEBAY_PLUGINS="schedulers,good_beside")
    assert {r["package"] for r in records} == {"schedulers", "good_beside"}
    assert {r["state"] for r in records} == {"ready"}


def test_a_misspelt_name_in_the_variable_is_an_error(site: Path) -> None:
    done = run(site, "plugins", ENGINEBAY_PLUGINS="schedulers,good_besid")
    assert done.returncode == 2
    assert "unknown plugin 'good_besid'" in done.stderr
    assert "Did you mean 'good_beside'?" in done.stderr
    assert "Traceback" not in done.stderr
