"""SamplingParams refuse what cannot be served, when made and when changed; metrics say nothing they
do not know.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from enginebay.errors import RequestError
from enginebay.outputs import RequestMetrics, RequestOutput
from enginebay.types import FrozenSampling, SamplingParams

BAD_VALUES: list[tuple[str, Any]] = [
    ("max_tokens", -1),
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
    ("skip_special_tokens", 3),
    ("max_tokens", "16"),
    ("max_tokens", 16.0),
    ("max_tokens", True),
    ("temperature", "0.5"),
    ("temperature", True),
    ("top_k", "5"),
    ("top_k", 5.0),
    ("top_k", False),
    ("top_p", "1"),
    ("min_p", False),
    ("presence_penalty", True),
    ("frequency_penalty", "1"),
    ("repetition_penalty", "1"),
    ("seed", "7"),
    ("seed", True),
    ("n", "2"),
    ("n", 2.0),
    ("n", True),
    ("best_of", 0),
    ("best_of", 257),
    ("best_of", "3"),
    ("best_of", 3.0),
    ("best_of", True),
    ("stop", [True]),
    ("stop_token_ids", ["5"]),
    ("stop_token_ids", [5.0]),
    ("stop_token_ids", [True]),
    ("stop_words_ids", 5),
    ("stop_words_ids", [5]),
    ("stop_words_ids", [[]]),
    ("stop_words_ids", [[5], ["6"]]),
    ("stop_words_ids", [[5.0]]),
    ("stop_words_ids", ["56"]),
    ("ignore_eos", 1),
    ("ignore_eos", "yes"),
    ("include_stop_str_in_output", 0),
    ("skip_special_tokens", "true"),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", 21),
    ("prompt_logprobs", "2"),
    ("prompt_logprobs", 2.0),
    ("prompt_logprobs", True),
    ("logprobs", -2),
    ("logprobs", 21),
    ("logprobs", 2.0),
    ("logprobs", True),
    ("suppress_repetition_in_generation", 1),
    ("no_repeat_ngram_size", -1),
    ("no_repeat_ngram_size", "3"),
    ("min_tokens", -1),
    ("min_tokens", 2.0),
    ("logit_bias", {5: 100.5}),
    ("logit_bias", {5: math.nan}),
    ("logit_bias", {"5": 1.0}),
    ("logit_bias", [5]),
    ("allowed_token_ids", []),
    ("allowed_token_ids", ["5"]),
    ("bad_words", [""]),
    ("bad_words", [5]),
    ("typical_p", 0.0),
    ("typical_p", 1.5),
    ("typical_p", math.nan),
    ("processors", ["dry"]),
    ("processors", {"dry": 3}),
    ("json_schema", 5),
    ("json_object", 1),
    ("regex", 5),
    ("choice", [5]),
    ("grammar", 5),
]


@pytest.mark.parametrize(("field", "value"), BAD_VALUES)
def test_a_bad_value_is_refused_in_one_line_that_names_it(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as refusal:
        SamplingParams(**{field: value})
    message = str(refusal.value)
    assert message.startswith(field)
    assert "\n" not in message


@pytest.mark.parametrize(("field", "value"), BAD_VALUES)
def test_a_bad_value_is_refused_on_assignment_and_the_old_one_stays(field: str, value: Any) -> None:
    params = SamplingParams()
    before = getattr(params, field)
    with pytest.raises(RequestError, match=field):
        setattr(params, field, value)
    assert getattr(params, field) == before


def test_every_field_that_has_bounds_has_a_bad_value_here() -> None:
    assert set(SamplingParams.model_fields) == {field for field, _ in BAD_VALUES}


def test_an_unknown_field_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        RequestError, match=r"max_token = 5, an unknown field.*Did you mean 'max_tokens'"
    ):
        SamplingParams(max_token=5)
    with pytest.raises(RequestError, match="beam_width"):
        SamplingParams().beam_width = 3  # type: ignore[attr-defined]


def test_several_bad_values_are_all_named() -> None:
    with pytest.raises(RequestError, match=r"top_p = 2\.0\. .* Also: max_tokens = -1\. "):
        SamplingParams(max_tokens=-1, top_p=2.0)


def test_a_huge_bad_value_is_not_repeated_in_full() -> None:
    with pytest.raises(RequestError) as refusal:
        SamplingParams(max_tokens="line\n" * 10_000)
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


@pytest.mark.parametrize(
    "given",
    [
        [5, 7],
        (5, 7),
        range(5, 8, 2),
        np.array([5, 7]),
        [np.int64(5), np.int32(7)],
        {5, 7},
        frozenset((5, 7)),
    ],
    ids=lambda given: type(given).__name__,
)
def test_ids_may_come_in_any_list(given: Any) -> None:
    params = SamplingParams(stop_token_ids=given)
    assert params.stop_token_ids == tuple(given)
    assert set(params.stop_token_ids) == {5, 7}
    assert SamplingParams(stop_words_ids=[given]).stop_words_ids == (tuple(given),)


@pytest.mark.parametrize("number", [10**7, 10**12, 10**30])
def test_a_range_that_no_memory_holds_is_refused(number: int) -> None:
    with pytest.raises(RequestError, match="stop_token_ids = range"):
        SamplingParams(stop_token_ids=range(number))  # type: ignore[arg-type]


def test_numbers_of_numpy_count_as_what_they_are() -> None:
    params = SamplingParams(
        max_tokens=np.int64(3), temperature=np.float32(0.5), ignore_eos=np.True_
    )
    assert params.model_dump(exclude_unset=True) == {
        "max_tokens": 3,
        "temperature": 0.5,
        "ignore_eos": True,
    }
    with pytest.raises(RequestError, match=r"max_tokens = 3\.0"):
        SamplingParams(max_tokens=np.float64(3))


def test_parameters_come_back_from_json() -> None:
    params = SamplingParams(
        stop="end", stop_words_ids=[[5, 7], [8]], n=2, best_of=3, prompt_logprobs=0
    )
    assert SamplingParams(**json.loads(params.model_dump_json())) == params
    assert SamplingParams.model_validate_json(params.model_dump_json()) == params


def test_fewer_completions_than_are_returned_cannot_be_made() -> None:
    with pytest.raises(
        RequestError, match=r"best_of = 2\. .*best_of of at least n; they would be 2 and 3"
    ):
        SamplingParams(n=3, best_of=2)
    params = SamplingParams(n=2, best_of=3)
    for field, value in (("n", 4), ("best_of", 1)):
        with pytest.raises(RequestError, match=field):
            setattr(params, field, value)
    assert (params.n, params.best_of) == (2, 3)
    params.best_of = None
    params.n = 4


def test_borders_are_allowed() -> None:
    SamplingParams(max_tokens=1, temperature=0, top_k=-1, top_p=1, min_p=1, seed=2**63 - 1, n=256)
    SamplingParams(best_of=256, logprobs=-1, prompt_logprobs=20, stop_words_ids=())
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
def test_only_values_that_change_something_are_penalties(
    changes: dict[str, float], penalises: bool
) -> None:
    assert FrozenSampling(1, SamplingParams(**changes)).penalises == penalises


def test_rates_of_too_few_tokens_are_unknown() -> None:
    metrics = RequestMetrics(
        arrival_s=1.0, first_token_s=2.0, finished_s=4.0, num_generated_tokens=1
    )
    assert metrics.time_to_first_token_s == 1.0
    assert math.isnan(metrics.tokens_per_second)
    metrics.num_generated_tokens = 5
    assert metrics.tokens_per_second == 2.0


def test_an_output_without_completions_has_no_text() -> None:
    assert RequestOutput("r", None, [1], []).get_text() == ""
