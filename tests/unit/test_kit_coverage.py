"""A capability that a kernel declares has an axis in the kit of its op, or a written reason."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from enginebay.plugins.hooks import CAPABILITIES
from enginebay.plugins.registry import Entry, load_registry
from enginebay_testing.cases import KNOWN_VALUES, NOT_IN_CASES, capability_cases, part_cases
from enginebay_testing.op_kit import kit_of
from enginebay_testing.verdicts import judge

REGISTRY = load_registry()
KERNELS = [e for e in REGISTRY.entries if e.kind == "kernel" and e.declaration is not None]


def declaring(op: str, **capabilities: Any) -> Entry:
    """Return the plain kernel of an op with other capabilities."""
    entry = REGISTRY.find("kernel", "xla", op)
    assert entry.declaration is not None
    declaration = dataclasses.replace(entry.declaration, capabilities=capabilities)
    return dataclasses.replace(entry, declaration=declaration)


def verdicts(entry: Entry) -> dict[str, tuple[str, str]]:
    cases = capability_cases(entry, kit_of(REGISTRY, entry.op))
    outcomes = {case.name: judge(case.run) for case in cases}
    return {name: (str(outcome.verdict), outcome.detail) for name, outcome in outcomes.items()}


@pytest.mark.parametrize("op", ["rms_norm", "rope", "sample", "all_reduce"])
def test_a_declared_capability_without_an_axis_is_an_error(op: str) -> None:
    ((name, (verdict, detail)),) = verdicts(declaring(op, storages=("int8",))).items()
    assert (name, verdict) == ("capability[storages]", "ERROR")
    assert f"the kit of op {op} has no axis for it" in detail
    assert "OpKit.capabilities" in detail


def test_a_declared_value_that_the_kit_does_not_know_is_told() -> None:
    found = verdicts(declaring("linear", quantizations=("int8", "nf4"), priority=3))
    ((name, (verdict, detail)),) = found.items()
    assert (name, verdict) == ("capability[quantizations-nf4]", "UNSUPPORTED")
    assert "the kit has no data for quantizations nf4" in detail


def test_check_runs_the_case() -> None:
    names = [case.name for case in part_cases(REGISTRY, declaring("rope", storages=("int8",)))]
    assert "capability[storages]" in names


@pytest.mark.parametrize("entry", KERNELS, ids=lambda entry: f"{entry.op}-{entry.name}")
def test_every_capability_of_our_kernels_is_in_the_cases(entry: Entry) -> None:
    assert not verdicts(entry)


def test_every_capability_of_kernels_has_an_axis_or_a_reason() -> None:
    assert {*KNOWN_VALUES, *NOT_IN_CASES, "layouts"} == {*CAPABILITIES["kernel"], "priority"}
    assert all(len(reason.split()) > 4 for reason in NOT_IN_CASES.values())
