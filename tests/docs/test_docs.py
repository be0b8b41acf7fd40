"""The documentation is complete and true: names are in it, and links lead somewhere."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from enginebay.cli.program import load_command, summaries
from enginebay.config import DEFAULT_AXIS_RULES, EngineConfig
from enginebay.contracts.platform import Hardware, Platform
from enginebay.ops.caps import Caps
from enginebay.plugins import hooks
from enginebay.plugins.hooks import Declaration, Hooks
from enginebay.plugins.registry import load_registry
from enginebay.types import SamplingParams
from tools.promises import promises
from tools.reference_tables import with_tables

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FLAG = re.compile(r"(?:^  |, )(--?[a-z][a-z-]*)", re.MULTILINE)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
PICTURE = re.compile(r"!\[[^\]]*\]\(([^)\s]+)\)")
TEST_NAME = re.compile(r"tests/[\w/]+\.py::test_\w+")
PROMISE_ID = re.compile(r"[A-Z]+\d+")


def anchors(path: Path) -> set[str]:
    """What a link may name behind "#": the headings of a page, as GitHub writes them."""
    text = re.sub(
        r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.strip().lower()).replace(" ", "-") for h in headings}


def leads_somewhere(path: Path, target: str) -> bool:
    """Whether a link of a page names a file that exists and, of another page, a heading."""
    file, _, anchor = target.partition("#")
    there = path.parent / file if file else path
    return there.exists() and (not anchor or anchor in anchors(there))


def page(name: str) -> str:
    """The text of a page as the site has it, with the tables that are made from the code."""
    return with_tables((ROOT / "docs" / name).read_text(encoding="utf-8"))


def missing(names: Iterator[str] | list[str], text: str) -> list[str]:
    """Names that do not stand between backticks in a page, alone or as a call."""
    code = " ".join(re.findall(r"`([^`\n]+)`", text))
    return sorted(
        name for name in names if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", code)
    )


def test_every_hook_kind_field_and_state_is_in_the_plugins_page() -> None:
    text = page("plugins.md")
    defined = [name for name, _ in inspect.getmembers(Hooks, inspect.isfunction)]
    assert sorted(defined) == sorted(hooks.hook_name(kind) for kind in hooks.INTERFACE_VERSIONS)
    names = [
        *defined,
        *(f.name for f in dataclasses.fields(Declaration)),
        "ready",
        "unavailable",
        "broken",
    ]
    assert not missing(names, text)
    assert not [kind for kind in hooks.INTERFACE_VERSIONS if f" {kind} " not in text]
    assert not missing([f.name for f in dataclasses.fields(Caps)], text)


def test_every_field_and_part_option_is_in_the_configuration_page() -> None:
    """The options of logits processors are those of a request: they are in the sampling page."""
    names, of_requests = list(EngineConfig.model_fields), []
    registry = load_registry()
    for entry in registry.entries:
        if entry.distribution == "enginebay" and entry.declaration and entry.declaration.options:
            options = type(registry.options(entry, {})).model_fields
            if entry.kind == "processor":
                of_requests += [entry.name, *options]
            else:
                names += options
    assert not missing(names, page("configuration.md"))
    assert not missing(of_requests, page("sampling.md"))


def test_every_built_in_part_is_named_somewhere() -> None:
    everything = "\n".join(with_tables(path.read_text(encoding="utf-8")) for path in PAGES)
    names = {entry.name for entry in load_registry().entries if entry.distribution == "enginebay"}
    assert not missing(sorted(names), everything)


def test_every_command_and_flag_is_in_the_commands_page() -> None:
    text = page("commands.md")
    assert not missing(list(summaries()), text)
    for command in summaries():
        parser = argparse.ArgumentParser()
        load_command(command).add_arguments(command, parser)
        flags = set(FLAG.findall(parser.format_help())) - {"-h"}
        assert flags >= {"--help"}
        assert not missing([*flags, "--log-level", "--version"], text), command


def test_every_sampling_parameter_is_in_the_sampling_page() -> None:
    assert not missing(list(SamplingParams.model_fields), page("sampling.md"))


def test_every_member_of_the_platform_contract_is_in_its_page() -> None:
    members = [
        *Platform.__annotations__,
        *(n for n, m in vars(Platform).items() if inspect.isfunction(m)),
    ]
    members += [field.name for field in dataclasses.fields(Hardware)]
    assert not missing(members, page("platforms.md"))


def test_every_logical_axis_is_in_the_glossary() -> None:
    assert not missing(list(DEFAULT_AXIS_RULES), page("axes.md"))


def test_layers_of_the_architecture_page_are_those_that_are_held() -> None:
    held = re.search(
        r"^layers = \[(.*?)^\]",
        (ROOT / "pyproject.toml").read_text(encoding="utf-8"),
        re.DOTALL | re.MULTILINE,
    )
    assert held is not None
    layers = re.findall(r'"([^"]+)"', held[1])
    assert "\n".join(f"    {layer}" for layer in layers) in page("architecture.md")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path: Path) -> None:
    targets = [t for t in LINK.findall(path.read_text(encoding="utf-8")) if "://" not in t]
    lost = [t for t in targets if not leads_somewhere(path, t)]
    assert not lost, "to a page of tools/generated_pages.py, link by its data"


def test_pictures_are_there() -> None:
    for path in PAGES:
        for target in PICTURE.findall(path.read_text(encoding="utf-8")):
            assert (path.parent / target).exists(), f"{path.name} shows {target}"


def test_figures_of_the_readme_stand_on_the_page_of_performance() -> None:
    rows = [one for one in (ROOT / "README.md").read_text().splitlines() if one.startswith("| ")]
    cells = [cell.strip() for row in rows[1:] for cell in row.split("|")[2:-1]]
    measured = (ROOT / "docs/performance.md").read_text()
    assert len([cell for cell in cells if cell]) >= 10
    assert [
        cell for cell in cells if cell and not re.search(rf"\| {cell}( \|| \()", measured)
    ] == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        path = waiting.pop().resolve()
        if path in reached or not path.exists():
            continue
        reached.add(path)
        if path.is_dir():
            waiting += path.glob("*.md")
        elif path.suffix == ".md":
            links = LINK.findall(path.read_text(encoding="utf-8"))
            waiting += [
                path.parent / t.split("#")[0] for t in links if "://" not in t and t[0] != "#"
            ]
    unreached = {p for p in PAGES if p.parent != ROOT and "examples" not in p.parts} - reached
    assert not unreached


def test_promises_name_tests_that_exist() -> None:
    """An id that is given twice is no TOML."""
    found = promises()
    assert not [name for name in found if not PROMISE_ID.fullmatch(name)]
    assert not [name for name, one in found.items() if not one.held_by], "a promise names no test"
    for name, one in found.items():
        for held in one.held_by:
            assert TEST_NAME.fullmatch(held), f"{name} names {held}: write tests/FILE.py::test_NAME"
            file, test = held.split("::")
            source = ROOT / file
            assert source.is_file(), f"{name} names {file}, which does not exist"
            defined = re.search(
                rf"^(async )?def {test}\(", source.read_text(encoding="utf-8"), re.MULTILINE
            )
            assert defined, f"{name} names {test}, which {file} does not have"


def test_promises_of_the_documented_apis_are_cited_by_their_tests() -> None:
    """`# holds V38` beside a test or a group of tests leads its reader to the promise."""
    cited: dict[str, set[str]] = {}
    for path in (ROOT / "tests").rglob("*.py"):
        for ids in re.findall(
            rf"# holds ({PROMISE_ID.pattern}(?:, {PROMISE_ID.pattern})*)",
            path.read_text(encoding="utf-8"),
        ):
            for one in ids.split(", "):
                cited.setdefault(one, set()).add(path.relative_to(ROOT).as_posix())
    found = promises()
    assert not cited.keys() - found.keys(), "tests cite promises that are not in promises.toml"
    for name, one in found.items():
        if re.fullmatch(r"[VBSOD]G?\d+", name):
            files = {held.split("::")[0] for held in one.held_by}
            assert files & cited.get(name, set()), f"no test that holds {name} cites it"
