"""A stranger's plugin: installed, listed, chosen by name, equal in tokens, and held to the contracts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.plugins.install import EXAMPLES, install, listed, python, run

pytestmark = pytest.mark.xdist_group("stranger")

COMPARE = """
import json, sys
from enginebay import LLM, SamplingParams

prompts = [[5, 6, 7], list(range(40, 100)), [9]]
params = SamplingParams(max_tokens=10, ignore_eos=True)
small = {"max_model_len": 256, "max_num_seqs": 4, "layout": "hnd"}
theirs = {"attention": {"decode": "chunked_scan", "prefill": "chunked_scan", "mixed": "chunked_scan"}}
tokens = []
for choices in ({}, {"scheduler": "shortest_prompt_first", "kernels": theirs}, sys.argv[1]):
    llm = LLM.from_config(choices) if isinstance(choices, str) else LLM("demo", **small, **choices)
    with llm:
        tokens.append([o.outputs[0].token_ids for o in llm.generate(prompts, params)])
        chosen = {r.setting: r.chosen for r in llm.plan.reasons}
print(json.dumps({"tokens": tokens, "chosen": chosen}))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install("stranger", tmp_path_factory.mktemp("site"))


def test_stranger_is_listed_with_its_distribution(site: Path) -> None:
    found = {r["name"]: r for r in listed(site) if r["package"] == "stranger"}
    assert {name: (r["kind"], r["op"], r["state"]) for name, r in found.items()} == {
        "shortest_prompt_first": ("scheduler", "", "ready"),
        "chunked_scan": ("kernel", "attention", "ready"),
    }
    assert {(r["distribution"], r["version"]) for r in found.values()} == {("enginebay-stranger", "0.1.0")}


def test_parts_chosen_by_name_give_the_reference_tokens(site: Path) -> None:
    done = python(site, "-c", COMPARE, str(EXAMPLES / "stranger" / "stranger.toml"))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    reference, stranger, from_file = result["tokens"]
    assert stranger == reference
    assert from_file == reference
    assert result["chosen"]["scheduler"] == "shortest_prompt_first"
    assert result["chosen"]["kernels.attention.decode"] == "chunked_scan"
    assert result["chosen"]["kernels.attention.prefill"] == "xla"


def test_auto_keeps_to_the_built_in_parts(site: Path) -> None:
    done = run(site, "explain", "--json")
    assert done.returncode == 0, done.stderr
    choices = {c["setting"]: c for c in json.loads(done.stdout)["choices"]}
    assert choices["scheduler"]["chosen"] == "fcfs"
    assert choices["kernels.attention.prefill"]["chosen"] == "xla"
    assert choices["kernels.attention.decode"]["chosen"] in ("native", "xla"), "native where a compiler is"
    refused = {r["name"]: r["reason"] for r in choices["kernels.attention.decode"]["refused"]}
    assert "lower priority" in refused["chunked_scan"]


def test_layout_that_the_kernel_lacks_is_an_error_and_no_fallback(site: Path) -> None:
    done = run(site, "explain", "--attention", "chunked_scan", "--layout", "tpu_rpa")
    assert done.returncode == 2
    assert "does not support layout tpu_rpa" in done.stderr
    assert "Traceback" not in done.stderr


PARTS = ("scheduler:shortest_prompt_first", "kernel:attention:chunked_scan")
QUICK = "shortest_prompt_first or declaration_holds or paged_float32 or softcap or constant_v"


def conformance(site: Path, *more: str) -> str:
    """What pytest says of the two parts; the plugin is named on the command line, as a stranger would."""
    chosen = [word for part in PARTS for word in ("--enginebay-check", part)]
    done = python(
        site, "-m", "pytest", "-p", "enginebay.testing", "-p", "no:cacheprovider", "-q", *chosen, *more
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_stranger_passes_the_conformance_suites_in_short(site: Path) -> None:
    said = conformance(site, "-k", QUICK, "-rs")
    assert " passed" in said
    assert "does not support features softcap" in said


@pytest.mark.slow
def test_stranger_passes_the_conformance_suites(site: Path) -> None:
    assert " passed" in conformance(site)


def test_unknown_part_for_the_suites_is_told_with_the_nearest(site: Path) -> None:
    command = (
        "-m",
        "pytest",
        "-p",
        "enginebay.testing",
        "-q",
        "--enginebay-check",
        "scheduler:shortest_promt_first",
    )
    done = python(site, *command)
    assert done.returncode == 4
    assert "Did you mean 'shortest_prompt_first'?" in done.stdout + done.stderr


def test_own_tests_of_the_example_pass(site: Path) -> None:
    tests = EXAMPLES / "stranger" / "tests" / "test_behaviour.py"
    done = python(
        site,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(site),
        "-c",
        "/dev/null",
        str(tests),
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_of_the_stranger_is_imported_before_it_is_picked(site: Path) -> None:
    code = (
        "import sys; from enginebay.registry import load_registry; r = load_registry(); "
        "print(sorted(m for m in sys.modules if m.startswith('enginebay_stranger')))"
    )
    done = python(site, "-c", code)
    assert done.stdout.strip() == "['enginebay_stranger', 'enginebay_stranger.plugin']", done.stderr
