"""Generated configurations: what enginebay makes of config.json against what transformers does."""

from __future__ import annotations

import collections
import re

import numpy as np
import pytest

from tests.parity import config_zoo, derived, zoo_reference
from tests.parity.config_zoo import Derived, Generated
from tests.parity.test_goldens import TOLERANCE

PARTS = 10
LEAST_EQUAL = 0.4
"""At least this share of the configurations is served by both, so that the comparison compares."""


def outcome(one: Generated, theirs: Derived | str) -> str:
    """How both take a configuration; AssertionError when they differ, or when a refusal names no
    field.
    """
    ours = config_zoo.ours(one)
    if isinstance(ours, str):
        field = field_of(ours)
        return "both refuse" if isinstance(theirs, str) else f"refused by name: {field}"
    assert not isinstance(theirs, str), f"served, where transformers says {theirs}: {one.text}"
    difference = ours.difference(theirs)
    assert difference is None, f"{difference}: {one.text}"
    return "equal"


def field_of(message: str) -> str:
    """The field that a refusal names."""
    found = re.search(r"config\.json has (?:no )?(.+?)(?: = | with different |\. Allowed)", message)
    assert found, message
    return found[1]


@pytest.mark.torch
@pytest.mark.parametrize("part", range(PARTS), ids="configs-{}".format)
def test_derived_values_are_those_of_transformers(part: int) -> None:
    configs = [config_zoo.generate(index) for index in range(part, config_zoo.NUM_CONFIGS, PARTS)]
    outcomes = collections.Counter(outcome(one, zoo_reference.derived(one)) for one in configs)
    assert outcomes["equal"] >= LEAST_EQUAL * len(configs), outcomes
    assert sum(outcomes.values()) == len(configs)


@pytest.mark.torch
@pytest.mark.parametrize("part", range(PARTS), ids="logits-{}".format)
def test_logits_of_two_layers_are_those_of_transformers(part: int) -> None:
    chosen = config_zoo.chosen_for_logits()
    assert len(chosen) == config_zoo.NUM_LOGITS
    for index in chosen[part::PARTS]:
        one = config_zoo.generate(index)
        token_ids = np.random.default_rng(index).integers(0, 64, one.max_model_len).tolist()
        error = np.abs(
            config_zoo.logits(one, token_ids) - zoo_reference.logits(one, token_ids)
        ).max()
        assert error <= TOLERANCE, f"logits differ by {error:.1e}: {one.text}"


@pytest.mark.parametrize("stored", derived.read(), ids=derived.name_of)
def test_derived_values_are_the_stored_ones_of_transformers(stored: derived.Stored) -> None:
    outcome(stored.generated, stored.theirs)


def test_stored_values_have_every_rule_and_refusals() -> None:
    rules = {
        one.generated.traits["rule"] for one in derived.read() if not isinstance(one.theirs, str)
    }
    assert rules >= {name for name in config_zoo.RULES if not name.startswith("!")}
    assert sum(isinstance(one.theirs, str) for one in derived.read()) >= 10
