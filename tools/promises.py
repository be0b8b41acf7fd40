"""Reads tests/promises.toml, and makes the page of promises from it."""

from __future__ import annotations

import dataclasses
import itertools
import tomllib
from collections.abc import Mapping
from pathlib import Path

DATA = Path(__file__).parents[1] / "tests" / "promises.toml"
HEAD = """# Promises

This page lists the promises of enginebay, each with the tests that check it. The page is made from
`tests/promises.toml`. A test reads that file, and fails when a promise names no test or one that
does not exist. Conformance suites run for every registered part, so a promise about a contract
applies to every built-in part and to the parts of other plugins.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Promise:
    """A promise of a section of the page. `held_by`: its tests, as FILE::TEST."""

    section: str
    promise: str
    held_by: list[str]


def promises() -> dict[str, Promise]:
    """Return the promises by their ids."""
    data = tomllib.loads(DATA.read_text(encoding="utf-8"))
    return {name: Promise(**fields) for name, fields in data.items()}


def page(found: Mapping[str, Promise]) -> str:
    """Return the text of the page."""
    parts = [HEAD]
    for section, group in itertools.groupby(found.items(), lambda item: item[1].section):
        rows = []
        for name, one in group:
            tests = ", ".join(f"`{test}`" for test in one.held_by)
            rows.append(f"| {name} | {one.promise} | {tests} |\n")
        parts.append(f"## {section}\n\n| id | promise | held by |\n|---|---|---|\n{''.join(rows)}")
    return "\n".join(parts)
