"""The data of the support page is what the kernels of this environment declare."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from enginebay.plugins.registry import load_registry
from enginebay_testing.matrix import support_matrix
from enginebay_testing.suites import label
from tools.support_page import page

DOCS = Path(__file__).resolve().parents[2] / "docs"
DECLARED = ("summary", "platforms", "layouts", "declared")


@pytest.fixture(scope="module")
def written() -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = json.loads((DOCS / "support.json").read_text(encoding="utf-8"))
    return parts


def test_every_kernel_of_ours_is_in_the_data_as_it_declares_itself(
    written: list[dict[str, Any]],
) -> None:
    registry = load_registry()
    ours = [e for e in registry.entries if e.kind == "kernel" and e.distribution == "enginebay"]
    listed = {part["part"]: part for part in written}
    assert {label(entry) for entry in ours} == set(listed), "run `make support`"
    for part in support_matrix(registry, ours, []):
        if not part["reason"]:  # its libraries are here
            there = listed[part["part"]]
            assert {k: part[k] for k in DECLARED} == {k: there[k] for k in DECLARED}, (
                "run `make support`"
            )


def test_no_fault_is_published(written: list[dict[str, Any]]) -> None:
    found = [
        (p["part"], c)
        for p in written
        for c in p["checked"]
        if c["verdict"] not in ("PASS", "UNSUPPORTED")
    ]
    assert not found


def test_a_fault_shows_in_the_page_and_a_word_of_the_data_is_a_cell() -> None:
    checked = {"level": "compile", "target": "v6e", "verdict": "ERROR", "reason": "a | b"}
    part = {
        "part": "kernel:attention:one",
        "summary": "a kernel",
        "platforms": ["tpu"],
        "layouts": ["nhd"],
        "declared": [{"axis": "mode", "value": "decode", "supported": True}],
        "checked": [
            {**checked, "axis": "", "value": "", "cases": {"ERROR": 1, "PASS": 2}},
            {**checked, "axis": "mode", "value": "decode", "cases": {"ERROR": 1, "PASS": 2}},
        ],
    }
    text = page([part])
    assert "| `kernel:attention:one` | compile | v6e | 2 | 0 | 1 | a \\| b |" not in text, (
        "a note is for what was not done"
    )
    assert "| `kernel:attention:one` | compile | v6e | 2 | 0 | 1 |" in text
    assert "| mode | decode | yes | error |" in text
