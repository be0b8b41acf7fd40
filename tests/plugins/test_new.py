"""`enginebay new`: what it writes installs, is listed, can be chosen, and keeps its contract as it
stands.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from enginebay.cli.new import KINDS, render, write_plugin
from enginebay.cli.program import main
from enginebay.errors import InputError, UnknownNameError
from tests.plugins.install import ROOT, command, install_from, listed, put, python, read, visible

pytestmark = pytest.mark.xdist_group("new")

QUICK = (
    "declaration_holds or decode_paged_float32 or replayed or top_k_1 or min_rows or facts or "
    "change_scores"
)
"""Some checks of each, for everyday; a slow test runs all."""

CHOICES = {
    "kernel": ("--attention", "kernels.attention.decode"),
    "scheduler": ("--scheduler", "scheduler"),
    "sampler": ("--sampler", "sampler"),
    "proposer": ("--proposer", "proposer"),
    "platform": ("--platform", "platform"),
    "engine": ("--engine", "engine"),
}
"""The flag that chooses each, and the setting that tells; requests ask for logits processors."""


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("plugins")
    return {kind: write_plugin(kind, f"my_{kind}", folder / kind) for kind in KINDS}


@pytest.fixture(scope="module")
def site(plugins: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of them, one by pip: their pyproject.toml is of one template."""
    folder = tmp_path_factory.mktemp("site")
    first, *others = plugins.values()
    install_from(folder, first)
    for plugin in others:
        put(plugin, folder)
    return folder


@pytest.fixture(scope="module")
def records(site: Path) -> list[dict[str, Any]]:
    return listed(site)


@pytest.mark.parametrize("kind", KINDS)
def test_a_plugin_is_three_files_and_its_module_is_short(
    kind: str, plugins: dict[str, Path]
) -> None:
    module = f"enginebay_my_{kind}.py"
    assert {p.name for p in plugins[kind].iterdir()} == {"pyproject.toml", module, f"test_{module}"}
    most = 150 if kind == "engine" else 60  # an engine has a ledger
    assert len((plugins[kind] / module).read_text(encoding="utf-8").splitlines()) < most


@pytest.mark.parametrize("name", ["x", "a_name_of_24_characters_"[:-1] + "s"])
def test_files_keep_the_projects_own_rules(name: str, tmp_path: Path) -> None:
    pytest.importorskip("ruff", reason="the dev extra has ruff")
    for kind in KINDS:
        (tmp_path / kind).mkdir()
        for file, text in render(kind, name).items():
            (tmp_path / kind / file).write_text(text, encoding="utf-8")
    for arguments in (["format", "--check"], ["check"]):
        config = ("--no-cache", "--config", ROOT / "pyproject.toml")
        words = [sys.executable, "-m", "ruff", *arguments, *config, tmp_path]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_listed_with_its_distribution(kind: str, records: list[dict[str, Any]]) -> None:
    name, op = f"my_{kind}", "attention" if kind == "kernel" else ""
    (found,) = (r for r in records if r["name"] == name and r["op"] == op)
    assert (found["kind"], found["state"]) == (KINDS[kind].split(":")[0], "ready")
    assert (found["distribution"], found["version"]) == (f"enginebay-my-{kind}", "0.1.0")


def test_each_can_be_chosen_by_name(site: Path) -> None:
    together = [
        w
        for kind in ("kernel", "scheduler", "sampler", "proposer", "engine")
        for w in (CHOICES[kind][0], f"my_{kind}")
    ]
    for arguments, kinds in (
        (together, CHOICES.keys() - {"platform"}),
        (["--platform", "my_platform"], {"platform"}),
        # Neither names the other: a kernel that declares no platforms serves any.
        (["--platform", "my_platform", "--attention", "my_kernel"], {"platform", "kernel"}),
    ):
        with visible(site):
            choices = read(command("explain", "--json", *arguments))["choices"]
        chosen = {c["setting"]: c["chosen"] for c in choices}
        assert {kind: chosen[CHOICES[kind][1]] for kind in kinds} == {
            kind: f"my_{kind}" for kind in kinds
        }


def test_auto_takes_none_of_them(site: Path) -> None:
    with visible(site):
        choices = read(command("explain", "--json"))["choices"]
    assert not [c for c in choices if c["chosen"].startswith("my_")]


TOKENS = """
import json
from enginebay import LLM, SamplingParams

small = {"max_model_len": 128, "max_num_seqs": 2, "max_num_batched_tokens": 128}
small |= {"dtype": "float32", "layout": "hnd"}
mine = {"scheduler": "my_scheduler", "sampler": "my_sampler", "engine": "my_engine"}
mine |= {"platform": "my_platform", "proposer": "my_proposer"}
params = SamplingParams(max_tokens=8, ignore_eos=True)
kernel = {"kernels": {"attention": "my_kernel"}, **mine}
tokens = []
for choices in ({}, mine, kernel):
    with LLM("demo", **small, **choices) as llm:
        outputs = llm.generate([[5, 6, 7], list(range(40, 100))], params)
        tokens.append([o.outputs[0].token_ids for o in outputs])
print(json.dumps(tokens))
"""


@pytest.mark.slow
def test_they_serve_together_with_the_built_in_parts_tokens(site: Path) -> None:
    done = python(site, "-c", TOKENS)
    assert done.returncode == 0, done.stderr
    reference, mine, with_kernel = json.loads(done.stdout)
    assert mine == reference
    assert with_kernel == reference


def what_pytest_says(site: Path, plugins: dict[str, Path], kinds: Iterable[str], *more: str) -> str:
    """What pytest says of the tests written with the plugins, and of the suites of their kinds
    beside them.
    """
    parts = [word for kind in kinds for word in ("--enginebay-check", f"{KINDS[kind]}my_{kind}")]
    tests = [str(plugins[kind]) for kind in kinds]
    options = ("-q", "-rA", "-p", "enginebay_testing", "-p", "no:cacheprovider", "-W", "error")
    rootdir = ("--rootdir", str(site), "-c", "/dev/null")
    done = python(site, "-m", "pytest", *options, *rootdir, *parts, *more, *tests)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
def test_they_keep_their_contracts_in_short(site: Path, plugins: dict[str, Path]) -> None:
    said = what_pytest_says(site, plugins, KINDS, "-k", QUICK)
    for kind, selector in KINDS.items():
        assert f"PASSED {selector}my_{kind}::declaration_holds" in said
        assert re.search(rf"PASSED \S*test_enginebay_my_{kind}\.py::\S*declaration_holds", said), (
            said
        )


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_it_keeps_its_contract(kind: str, site: Path, plugins: dict[str, Path]) -> None:
    assert " passed" in what_pytest_says(site, plugins, [kind])


def test_the_command_writes_to_the_current_folder_and_tells_what_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "scheduler", "last_word"]) == 0
    assert (tmp_path / "enginebay-last-word" / "enginebay_last_word.py").is_file()
    said = capsys.readouterr().out
    for step in (
        "pip install -e",
        "enginebay plugins",
        "--scheduler last_word",
        "scheduler:last_word",
    ):
        assert step in said


def test_a_former_kind_is_written_as_todays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "logits_processor", "last_word"]) == 0
    assert "enginebay check processor:last_word" in capsys.readouterr().out


def test_an_unknown_kind_is_told_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'scheduler'"):
        write_plugin("schedular", "mine", tmp_path / "x")
    assert not (tmp_path / "x").exists()


NO_NAMES = [
    "",
    "My",
    "my-part",
    "2x",
    "_x",
    "x_",
    "a__b",
    "auto",
    "class",
    "a/b",
    "naïve",
    "x" * 25,
    "a b",
]


@pytest.mark.parametrize("name", NO_NAMES)
def test_a_name_that_cannot_be_one_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="lower-case words"):
        write_plugin("kernel", name, tmp_path / "x")


@pytest.mark.parametrize("name", ["fcfs", "xla", "schedulers", "models"])
def test_a_name_that_somebody_has_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="which enginebay has already"):
        write_plugin("scheduler", name, tmp_path / "x")


def test_a_folder_that_exists_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a folder that does not exist yet"):
        write_plugin("sampler", "mine", tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_to_is_wrong_input(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="a folder that can be written to"):
        write_plugin("sampler", "mine", tmp_path / "file" / "x")
