"""`enginebay check --seeds` reaches the cases, and numbers that make no sense are refused."""

from __future__ import annotations

import argparse

import pytest

from enginebay.errors import InputError
from enginebay.plugins.registry import load_registry
from enginebay_testing.cases import part_cases
from enginebay_testing.cli import COMMAND
from enginebay_testing.op_kit import NUM_SEEDS
from enginebay_testing.suites import Choices


def arguments(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    COMMAND.add_arguments("check", parser)
    return parser.parse_args(["kernel:rope:xla", *flags])


@pytest.mark.parametrize("number", ["0", "-1", "1001"])
def test_a_number_of_seeds_without_sense_is_refused(number: str) -> None:
    with pytest.raises(InputError, match=rf"--seeds {number}\. Allowed: 1 to 1000"):
        COMMAND.run("check", arguments("--seeds", number))


@pytest.mark.parametrize("seeds", [None, 3])
def test_a_case_runs_with_as_many_sets_of_inputs_as_wanted(
    seeds: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = load_registry()
    drawn = []
    from enginebay_testing.op_kit import PlainCase

    rng = PlainCase.rng

    def counted(case: PlainCase) -> object:
        drawn.append(case.seed)
        return rng(case)

    monkeypatch.setattr(PlainCase, "rng", counted)
    entry = registry.find("kernel", "xla", "rope")
    cases = part_cases(registry, entry, choices=Choices(seeds=seeds))
    next(case for case in cases if case.name == "rope[float32]").run()
    assert set(drawn) == set(range(seeds or NUM_SEEDS))
