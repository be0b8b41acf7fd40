"""SamplingParams refuse what cannot be served, when made and when changed; metrics say nothing they do not know."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from pydantic import ValidationError

from enginebay.errors import RequestError
from enginebay.types import (
    FrozenSampling,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
    make_sampling_params,
)

BAD_VALUES: list[tuple[str, Any]] = [
    ("max_tokens", 0),
    ("max_tokens", -3),
    ("max_tokens", 2.5),
    ("max_tokens", "many"),
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "warm"),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("top_p", math.nan),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("min_p", math.nan),
    ("presence_penalty", -2.1),
    ("presence_penalty", 2.1),
    ("presence_penalty", math.nan),
    ("frequency_penalty", -2.1),
    ("frequency_penalty", 2.1),
    ("frequency_penalty", math.nan),
    ("frequency_penalty", "much"),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1.0),
    ("repetition_penalty", math.inf),
    ("repetition_penalty", math.nan),
    ("seed", -1),
    ("seed", 2**63),
    ("seed", 0.5),
    ("n", 0),
    ("n", 257),
    ("stop", [""]),
    ("stop", ["a", 3]),
    ("stop", 7),
    ("stop", b"bytes"),
    ("stop_token_ids", 5),
    ("stop_token_ids", ["x"]),
    ("ignore_eos", "perhaps"),
    ("include_stop_str_in_output", None),
    ("skip_special_tokens", 3),
    ("logprobs", -1),
    ("logprobs", 21),
    ("logprobs", 2.0),
    ("logprobs", True),
]


@pytest.mark.parametrize(("field", "value"), BAD_VALUES)
def test_a_bad_value_is_refused_in_one_line_that_names_it(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as refusal:
        make_sampling_params(**{field: value})
    message = str(refusal.value)
    assert message.startswith(field)
    assert "\n" not in message


@pytest.mark.parametrize(("field", "value"), BAD_VALUES)
def test_a_bad_value_is_refused_on_assignment_and_the_old_one_stays(field: str, value: Any) -> None:
    params = SamplingParams()
    before = getattr(params, field)
    with pytest.raises(ValidationError, match=field):
        setattr(params, field, value)
    assert getattr(params, field) == before


def test_every_field_that_has_bounds_has_a_bad_value_here() -> None:
    assert set(SamplingParams.model_fields) == {field for field, _ in BAD_VALUES}


def test_an_unknown_field_is_refused_with_the_known_ones() -> None:
    with pytest.raises(RequestError, match=r"max_token = 5.*Allowed: the fields max_tokens, temperature"):
        make_sampling_params(max_token=5)
    with pytest.raises(ValidationError, match="beam_width"):
        SamplingParams().beam_width = 3  # type: ignore[attr-defined]


def test_several_bad_values_are_all_named() -> None:
    with pytest.raises(RequestError, match=r"max_tokens = 0: .*; top_p = 2\.0: "):
        make_sampling_params(max_tokens=0, top_p=2.0)


def test_a_huge_bad_value_is_not_repeated_in_full() -> None:
    with pytest.raises(RequestError) as refusal:
        make_sampling_params(max_tokens="line\n" * 10_000)
    assert len(str(refusal.value)) < 700
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("given", "kept"), [("end", ("end",)), (None, ()), (["a", "b"], ("a", "b")), ((), ())]
)
def test_stop_takes_one_text_or_several(given: Any, kept: tuple[str, ...]) -> None:
    assert SamplingParams(stop=given).stop == kept
    params = SamplingParams()
    params.stop = given
    assert params.stop == kept


def test_borders_are_allowed() -> None:
    SamplingParams(max_tokens=1, temperature=0, top_k=-1, top_p=1, min_p=1, seed=2**63 - 1, n=256)
    SamplingParams(presence_penalty=-2, frequency_penalty=2, repetition_penalty=1e-300)
    SamplingParams(presence_penalty=2, frequency_penalty=-2, repetition_penalty=1e300)


@pytest.mark.parametrize(
    ("changes", "penalises"),
    [
        ({}, False),
        ({"presence_penalty": -0.0}, False),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": -0.1}, True),
        ({"repetition_penalty": 0.9}, True),
    ],
)
def test_only_values_that_change_something_are_penalties(changes: dict[str, float], penalises: bool) -> None:
    sampling = FrozenSampling(1, 0.0, 0, 1.0, 0.0, (), (), False, True)
    assert dataclasses.replace(sampling, **changes).penalises == penalises


def test_rates_of_too_few_tokens_are_unknown() -> None:
    metrics = RequestMetrics(arrival_s=1.0, first_token_s=2.0, finished_s=4.0, num_generated_tokens=1)
    assert metrics.time_to_first_token_s == 1.0
    assert math.isnan(metrics.tokens_per_second)
    metrics.num_generated_tokens = 5
    assert metrics.tokens_per_second == 2.0


def test_an_output_without_completions_has_no_text() -> None:
    assert RequestOutput("r", None, [1], []).get_text() == ""
