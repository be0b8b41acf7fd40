"""The row table's sampling parameters: what its requests ask for, by row and together."""

from __future__ import annotations

import numpy as np
import pytest

from enginebay.types import SamplingParams
from tests.unit.rowtable import (
    ROWS,
    VOCAB,
    EngineRequest,
    make_request,
    make_sampling,
    make_table,
    with_fields,
)
from tests.unit.test_rows import numbered_table

pytestmark = pytest.mark.usefixtures("row_tables")


def test_active_sampling_params_name_what_changes_something() -> None:  # holds B08
    table = make_table()
    table.begin_sequence("plain", [1])
    table.begin_sequence(
        "penalty", [1], SamplingParams(temperature=0.5, presence_penalty=-1.5, top_k=7)
    )
    table.add_request(make_request("all", [1], number=2))
    usual = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
    assert table.get_active_sampling_params(0) == usual
    assert table.get_active_sampling_params(1) == usual | {
        "temperature": 0.5,
        "top_k": 7,
        "presence_penalty": -1.5,
    }
    assert table.get_active_sampling_params(2) == {
        "temperature": 0.5,
        "top_p": 0.875,
        "top_k": 2,
        "min_p": 0.0625,
        "frequency_penalty": -0.25,
        "presence_penalty": 0.25,
        "repetition_penalty": 1.5,
    }
    for no_request in (3, ROWS, -1, -4):
        assert table.get_active_sampling_params(no_request) == {}


def test_rows_with_penalties_are_named_in_order() -> None:  # holds B09
    table = make_table()
    assert table.get_request_indices_with_penalty().tolist() == []
    params = [
        {"repetition_penalty": 0.5},
        {},
        {"presence_penalty": -1.0},
        {"min_p": 0.5},
        {"frequency_penalty": 1.0},
    ]
    for row in (4, 2, 0, 1, 3):
        table.add_request(EngineRequest(f"r{row}", [1], SamplingParams(**params[row])), row)
    rows = table.get_request_indices_with_penalty()
    assert rows.tolist() == [0, 2, 4]
    assert rows.dtype == np.int32
    table.remove_request("r2")
    assert table.get_request_indices_with_penalty().tolist() == [0, 4]


NEUTRAL = {
    "all_greedy": True,
    "all_random": False,
    "no_allowed_token_ids": True,
    "no_min_p": True,
    "no_penalties": True,
    "no_prompt_logprob": True,
    "no_top_k": True,
    "no_top_p": True,
    "max_num_logprobs": None,
}


@pytest.mark.parametrize(
    ("params", "changed"),
    [
        ({}, {}),
        ({"temperature": 0.5}, {"all_greedy": False}),
        ({"allowed_token_ids": [1]}, {"no_allowed_token_ids": False}),
        ({"min_p": 0.1}, {"no_min_p": False}),
        ({"frequency_penalty": 0.1}, {"no_penalties": False}),
        ({"presence_penalty": -0.1}, {"no_penalties": False}),
        ({"repetition_penalty": 0.9}, {"no_penalties": False}),
        ({"prompt_logprobs": 0}, {"no_prompt_logprob": False}),
        ({"top_k": 1}, {"no_top_k": False}),
        ({"top_k": VOCAB}, {}),
        ({"top_k": -1}, {}),
        ({"top_p": 0.9}, {"no_top_p": False}),
        ({"logprobs": 0}, {"max_num_logprobs": 0}),
        ({"logprobs": -1}, {"max_num_logprobs": VOCAB}),
    ],
)
def test_properties_tell_what_some_request_asks_for(
    params: dict, changed: dict
) -> None:  # holds B10
    def told() -> dict:
        return {name: getattr(table, name) for name in NEUTRAL}

    table = make_table()
    assert told() == NEUTRAL | {"all_random": True}, "of nobody, everything is true"
    table.begin_sequence("neutral", [1])
    assert told() == NEUTRAL
    table.add_request(EngineRequest("other", [1], with_fields(make_sampling(), **params)))
    assert told() == NEUTRAL | changed
    table.swap_states(0, 1)
    assert told() == NEUTRAL | changed
    table.remove_request("neutral")
    assert told() == NEUTRAL | changed | {"all_random": table.temperature[0] > 0}
    table.remove_request("other")
    assert told() == NEUTRAL | {"all_random": True}
    assert (table.num_reqs, table.req_ids) == (0, [])


def test_most_logprobs_of_anyone_count() -> None:  # holds B10
    table = numbered_table("abc")
    assert table.max_num_logprobs == 3
    table.remove_request("c")
    assert table.max_num_logprobs == 2
