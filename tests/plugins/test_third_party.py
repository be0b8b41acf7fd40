"""A plugin's plugin: installed, listed, chosen by name, equal in tokens, and held to the
contracts.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from enginebay import LLM, SamplingParams
from enginebay_testing import pytest_plugin as plugin
from tests.brief import TINY
from tests.plugins.install import EXAMPLES, command, install, listed, python, read, visible

pytestmark = pytest.mark.xdist_group("third_party")

PROMPTS = [[5, 6, 7], list(range(40, 90)), [9]]
SMALL: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "decode_steps": 4,
    "layout": "hnd",
    "processors": (),
}
FILE = EXAMPLES / "third_party" / "third_party.toml"
THEIRS = dict.fromkeys(("decode", "prefill", "mixed"), "chunked_scan")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install("third_party", tmp_path_factory.mktemp("site"))


def test_third_party_plugin_is_listed_with_its_distribution(site: Path) -> None:
    found = {r["name"]: r for r in listed(site) if r["package"] == "third_party"}
    assert {name: (r["kind"], r["op"], r["state"]) for name, r in found.items()} == {
        "shortest_prompt_first": ("scheduler", "", "ready"),
        "chunked_scan": ("kernel", "attention", "ready"),
    }
    assert {(r["distribution"], r["version"]) for r in found.values()} == {
        ("enginebay-third-party", "0.1.0")
    }


def answers(llm: LLM) -> tuple[list[list[int]], dict[str, str]]:
    """Tokens of the prompts, and what was chosen."""
    with llm:
        outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=10, ignore_eos=True))
        tokens = [output.outputs[0].token_ids for output in outputs]
        return tokens, {reason.setting: reason.chosen for reason in llm.plan.reasons}


@pytest.mark.long
def test_parts_chosen_by_name_give_the_reference_tokens(site: Path) -> None:
    """The scheduler by the example's configuration file, the kernel in every phase."""
    with visible(site):
        reference, _ = answers(LLM(TINY, **SMALL))
        kernels = {"attention": THEIRS}
        third_party, chosen = answers(LLM.from_config(FILE, model=TINY, kernels=kernels, **SMALL))
    assert third_party == reference
    assert chosen["scheduler"] == "shortest_prompt_first"
    assert {chosen[f"kernels.attention.{phase}"] for phase in THEIRS} == {"chunked_scan"}


def test_the_examples_file_chooses_parts_of_two_plugins(site: Path) -> None:
    with visible(site):
        choices = read(command("explain", "--json", "--config", str(FILE)))["choices"]
    chosen = {choice["setting"]: choice["chosen"] for choice in choices}
    assert chosen["scheduler"] == "shortest_prompt_first"
    assert chosen["kernels.attention.decode"] == "chunked_scan"
    assert chosen["kernels.attention.prefill"] == "xla"


def test_auto_keeps_to_the_built_in_parts(site: Path) -> None:
    with visible(site):
        choices = {c["setting"]: c for c in read(command("explain", "--json"))["choices"]}
    assert choices["scheduler"]["chosen"] == "fcfs"
    assert choices["kernels.attention.prefill"]["chosen"] == "xla"
    assert choices["kernels.attention.decode"]["chosen"] in ("native", "xla"), (
        "native where a compiler is"
    )
    refused = {r["name"]: r["reason"] for r in choices["kernels.attention.decode"]["refused"]}
    assert "lower priority" in refused["chunked_scan"]


def test_layout_that_the_kernel_lacks_is_an_error_and_no_fallback(site: Path) -> None:
    with visible(site):
        done = command("explain", "--attention", "chunked_scan", "--layout", "tpu_rpa")
    assert done.returncode == 2
    assert "does not support layout tpu_rpa" in done.stderr
    assert "Traceback" not in done.stderr


PARTS = ("scheduler:shortest_prompt_first", "kernel:attention:chunked_scan")
TESTS = EXAMPLES / "third_party" / "tests" / "test_behaviour.py"
QUICK = "shortest_prompt_first or declaration_holds or paged_float32 or softcap or test_behaviour"


def conformance(site: Path, *more: str) -> str:
    """What pytest says of the two parts; the plugin is named on the command line, as a plugin
    would.
    """
    chosen = [word for part in PARTS for word in ("--enginebay-check", part)]
    options = ("-p", "enginebay_testing", "-p", "no:cacheprovider", "-q", "-rA")
    done = python(site, "-m", "pytest", *options, *chosen, *more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def in_short(site: Path) -> str:
    """Some checks of each part, and the example's own tests."""
    return conformance(site, "-k", QUICK, "--rootdir", str(site), "-c", "/dev/null", str(TESTS))


@pytest.mark.long
def test_third_party_plugin_passes_the_conformance_suites_in_short(in_short: str) -> None:
    for part in PARTS:
        assert f"PASSED {part}::" in in_short
    assert "does not support features softcap" in in_short


@pytest.mark.long
def test_own_tests_of_the_example_pass(in_short: str) -> None:
    names = re.findall(r"^def (test_\w+)", TESTS.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(names) == 4
    for name in names:
        assert re.search(rf"PASSED \S*::{name}\b", in_short)


@pytest.mark.slow
def test_third_party_plugin_passes_the_conformance_suites(site: Path) -> None:
    assert " passed" in conformance(site)


def test_unknown_part_for_the_suites_is_told_with_the_nearest(site: Path) -> None:
    chosen = {"enginebay_check": ["scheduler:shortest_promt_first"], "enginebay_level": "run"}
    config: Any = SimpleNamespace(getoption=chosen.get)
    session: Any = None
    with (
        visible(site),
        pytest.raises(pytest.UsageError, match="Did you mean 'shortest_prompt_first'"),
    ):
        plugin.pytest_collection_modifyitems(session, config, [])


def test_nothing_of_the_third_party_plugin_is_imported_before_it_is_picked(site: Path) -> None:
    code = (
        "import sys; from enginebay.plugins.registry import load_registry; r = load_registry(); "
        "print(sorted(m for m in sys.modules if m.startswith('enginebay_third_party')))"
    )
    done = python(site, "-c", code)
    assert done.stdout.strip() == "['enginebay_third_party', 'enginebay_third_party.plugin']", (
        done.stderr
    )
