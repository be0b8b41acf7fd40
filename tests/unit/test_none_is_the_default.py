"""None for a field of sampling parameters is the same as leaving the field out, wherever parameters
are made.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from enginebay.compose.sampling_defaults import NO_DEFAULTS
from enginebay.types import SamplingParams, as_sampling_params
from enginebay_dashinfer.allspark import ASGenerationConfigBuilder
from enginebay_dashinfer.sampling import DEFAULTS, to_sampling
from enginebay_oengine import InitialSequenceRequest
from enginebay_vinference import vInferenceConfig
from tests.unit.rowtable import EngineRequest, make_table

FIELDS = [name for name in SamplingParams.model_fields if name != "max_tokens"]
OTHER: dict[str, Any] = {"temperature": 0.5, "top_k": 3, "stop": "x", "ignore_eos": True, "n": 2}


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_takes_none(field: str) -> None:
    usual = SamplingParams()
    for params in (SamplingParams(**{field: None}), as_sampling_params({field: None})):
        assert params == usual
        assert field not in params.model_fields_set
    assert SamplingParams.model_validate({field: None}) == usual
    assert SamplingParams.model_validate_json(f'{{"{field}": null}}') == usual
    params = SamplingParams(**({field: OTHER[field]} if field in OTHER else {}))
    setattr(params, field, None)
    assert params == usual
    assert params.model_dump() == usual.model_dump()


def test_none_keeps_the_meaning_that_max_tokens_documents() -> None:
    assert SamplingParams(max_tokens=None).max_tokens is None
    assert "max_tokens" in SamplingParams(max_tokens=None).model_fields_set


def test_a_default_is_never_shared() -> None:
    one, other = SamplingParams(logit_bias=None), SamplingParams(logit_bias=None)
    one.logit_bias = None
    one.logit_bias[5] = 1.0
    assert other.logit_bias == SamplingParams().logit_bias == {}


def test_none_leaves_the_checkpoints_value() -> None:
    values = {"temperature": 0.7, "top_p": 0.9}
    defaults = dataclasses.replace(NO_DEFAULTS, values=values)
    filled = defaults.applied_to(SamplingParams(temperature=None, top_p=0.5))
    assert (filled.temperature, filled.top_p) == (0.7, 0.5)


@pytest.mark.parametrize("field", DEFAULTS)
def test_every_field_of_a_generation_takes_none(field: str) -> None:
    def choices(fields: dict[str, Any]) -> Any:
        return to_sampling({"seed": 3} | fields, 4, 16)

    assert choices({field: None} | ({"seed": 3} if field == "seed" else {})) == choices({})
    setter = getattr(ASGenerationConfigBuilder(seed=3), field, None)
    if setter is not None and field != "seed":
        assert choices(setter(None).build()) == choices(ASGenerationConfigBuilder(seed=3).build())


def test_a_waiting_prompt_takes_none() -> None:
    usual = InitialSequenceRequest("a", [1, 2])
    fields = ("temperature", "top_p", "top_k", "stop_token_ids", "ignore_eos", "seed")
    for field in fields:
        made = InitialSequenceRequest("a", [1, 2], **{field: None})
        assert getattr(made, field) == getattr(usual, field)
    assert InitialSequenceRequest("a", [1, 2], max_tokens=None).max_tokens is None


def test_a_row_of_a_sequence_buffer_takes_none() -> None:
    rows = []
    for fields in ({}, dict.fromkeys(SamplingParams.model_fields)):
        buffer = make_table()
        buffer.add_request(EngineRequest("a", [1, 2, 3], SimpleNamespace(**fields)))
        row = buffer.get_active_sampling_params(0)
        rows.append((row, buffer.all_greedy, buffer.no_penalties, buffer.no_min_p))
    assert rows[0] == rows[1]
    assert rows[0][0] == {"temperature": 0.0, "top_p": 1.0, "top_k": 0}


def test_parameters_of_a_configuration_take_none() -> None:
    named: Any = {"max_tokens": 8, "temperature": None, "top_p": None}
    config = vInferenceConfig(max_new_tokens=8, sampling_params=named)
    assert config.sampling_params == SamplingParams(max_tokens=8)
    assert vInferenceConfig(num_return_sequences=None).num_return_sequences in (None, 1)
