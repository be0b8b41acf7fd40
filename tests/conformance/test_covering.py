"""The cases that stand for all have every pair of properties that any case has."""

from __future__ import annotations

import itertools

from tests.conformance.covering import Traits, covering

AXES = {"mode": "abc", "dtype": "de", "home": "fghi", "feature": "jk"}
CASES: dict[str, Traits] = {
    "".join(values): dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())
}


def pairs(names: set[str]) -> set[tuple[object, ...]]:
    return {pair for name in names for pair in itertools.combinations(CASES[name].items(), 2)}


def test_few_cases_have_all_pairs() -> None:
    kept = covering(CASES, set())
    assert pairs(kept) == pairs(set(CASES))
    assert len(kept) < len(CASES) / 2


def test_cases_that_are_to_stay_do() -> None:
    assert {"adfj", "adfk"} <= covering(CASES, {"adfj", "adfk"})


def test_a_case_with_a_value_of_its_own_stays() -> None:
    odd = {"odd": CASES["adfj"] | {"feature": "of its own"}}
    assert "odd" in covering(CASES | odd, set())
