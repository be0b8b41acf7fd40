"""eSurge's keywords, its repr, and dicts in the place of SamplingParams."""

from __future__ import annotations

import typing

import pytest

from enginebay.config import EngineConfig
from enginebay.errors import RequestError
from enginebay.types import SamplingParams
from enginebay_esurge import eSurge
from enginebay_esurge.settings import OURS, FurtherChoices


def test_further_keywords_are_the_fields_that_no_documented_option_sets() -> None:
    documented = {*OURS, "forbid_compiling", "overlap_execution"}
    assert set(typing.get_type_hints(FurtherChoices)) - {"engine_options"} == (
        set(EngineConfig.model_fields) - documented
    )


def test_a_dict_is_taken_for_parameters_with_esurges_own_default(engine: eSurge) -> None:
    [short] = engine.generate("Once", {"max_tokens": 3, "ignore_eos": True})
    [same] = engine.generate("Once", SamplingParams(max_tokens=3, ignore_eos=True))
    assert short.outputs[0].token_ids == same.outputs[0].token_ids
    assert len(short.outputs[0].token_ids) == 3
    with pytest.raises(RequestError, match="max_token = 5, an unknown field"):
        engine.generate("Once", {"max_token": 5})  # type: ignore[dict-item]


def test_the_repr_says_what_runs(engine: eSurge) -> None:
    assert repr(engine).startswith("eSurge(")
    assert repr(engine).endswith(", running)")
    assert repr(engine.esurge_name) in repr(engine)
