"""The records of the vInference API: outputs, precompile configurations, generation settings."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from enginebay import SamplingParams
from enginebay_vinference import (
    PartitionAxis,
    PromptOutput,
    vInferenceConfig,
    vInferencePreCompileConfig,
)

PreCompile = vInferencePreCompileConfig


def test_prompt_output_has_five_optional_fields_by_keyword() -> None:  # holds V01
    fields = {"text", "generated_tokens", "tokens_per_second", "error", "finish_reason"}
    assert PromptOutput().model_dump() == dict.fromkeys(fields)
    assert set(PromptOutput.model_fields) == fields
    assert PromptOutput.model_config["arbitrary_types_allowed"] is True
    assert PromptOutput(text="a", finish_reason="stop").text == "a"
    with pytest.raises(TypeError):
        PromptOutput("a")  # type: ignore[misc]


def test_precompile_defaults() -> None:  # holds V10
    config = PreCompile()
    assert (config.batch_size, config.prefill_length, config.vision_included) == (1, None, False)
    vision = (
        "vision_batch_size",
        "vision_channels",
        "vision_height",
        "vision_width",
        "required_props",
    )
    assert all(getattr(config, name) is None for name in vision)
    lists = PreCompile([1, 2], [8, 16], [False, True], [1], [3], [4, 5], [6], [{"a": {"b": [1]}}])
    assert lists.batch_size == [1, 2]
    assert lists.required_props == [{"a": {"b": [1]}}]


@pytest.mark.parametrize(
    "wrong", [{"batch_size": 0}, {"prefill_length": [8, -1]}, {"batch_size": 1.5}]
)
def test_precompile_sizes_are_counts(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="a count of at least 1"):
        PreCompile(**wrong)  # type: ignore[arg-type]


def test_extract_has_all_eight_fields() -> None:  # holds V11
    found = PreCompile(2, 64).extract()
    assert list(found) == [field.name for field in dataclasses.fields(PreCompile)]
    assert len(found) == 8
    assert found["batch_size"] == 2


def test_hash_is_the_same_in_every_process_and_changes_with_every_field() -> None:  # holds V12
    config = PreCompile([1, 2], 64, required_props={"x": {"y": 1, "z": 2}})
    code = (
        "from enginebay_vinference import vInferencePreCompileConfig as C;"
        "print(C([1, 2], 64, required_props={'x': {'z': 2, 'y': 1}}).get_default_hash())"
    )
    for seed in ("0", "1"):
        run = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert int(run.stdout) == config.get_default_hash()
    assert (
        hash(config)
        == config.get_default_hash()
        == PreCompile((1, 2), 64, required_props=config.required_props).get_default_hash()
    )  # type: ignore[arg-type]
    changes = {
        "batch_size": 3,
        "prefill_length": None,
        "vision_included": True,
        "vision_batch_size": 1,
        "vision_channels": 1,
        "vision_height": 1,
        "vision_width": 1,
        "required_props": None,
    }
    hashes = {config.replace(**{name: value}).get_default_hash() for name, value in changes.items()}
    assert len(hashes | {config.get_default_hash()}) == 1 + len(changes)


def test_standalones_pair_the_lists() -> None:  # holds V13
    pairs = PreCompile([1, 2], [64, 128, 256], vision_channels=7).get_standalones()
    assert [(c.batch_size, c.prefill_length) for c in pairs] == [(1, 64), (2, 128), (2, 256)]
    assert all(c.vision_channels == 7 for c in pairs)
    one = PreCompile(2, 64)
    assert one.get_standalones() == [one]
    props = PreCompile(1, required_props=[{"a": {}}, {"b": {"c": [1, 2]}}]).get_standalones()
    assert [c.required_props for c in props] == [{"a": {}}, {"b": {"c": [1, 2]}}]
    with pytest.raises(ValueError, match=r"batch_size = \[\]"):
        PreCompile([]).get_standalones()


@pytest.mark.parametrize(
    ("longest", "least", "lengths"),
    [
        (2048, 64, [64, 128, 256, 512, 1024, 2048]),
        (64, 64, [64]),
        (3000, 64, [64, 128, 256, 512, 1024, 2048, 3000]),
    ],
)
def test_optimized_lengths_double_and_end_with_the_longest(
    longest: int, least: int, lengths: list[int]
) -> None:  # holds V14
    config = PreCompile.create_optimized_compo(2, longest, least)
    assert config.prefill_length == lengths
    assert config.batch_size == 2


def test_optimized_lengths_need_room() -> None:
    with pytest.raises(ValueError, match="min_prefill_length"):
        PreCompile.create_optimized_compo(1, 32, 64)


counts = st.integers(1, 4096)


@given(
    st.builds(
        PreCompile,
        batch_size=counts | st.lists(counts, min_size=1),
        prefill_length=st.none() | counts | st.lists(counts, min_size=1),
        vision_included=st.booleans(),
        vision_batch_size=st.none() | counts,
        vision_channels=st.none() | counts,
        vision_height=st.none() | counts,
        vision_width=st.none() | counts,
        required_props=st.none()
        | st.dictionaries(st.text(), st.dictionaries(st.text(), st.integers() | st.text())),
    )
)
def test_precompile_round_trips(config: PreCompile) -> None:  # holds V15
    assert PreCompile.from_dict(config.to_dict()) == config
    assert PreCompile.from_json(config.to_json(indent=1)) == config
    assert config.replace(batch_size=9).batch_size == 9
    with pytest.raises(TypeError):
        config.replace(nothing=1)


def test_config_defaults() -> None:  # holds V20
    config = vInferenceConfig()
    assert (config.max_new_tokens, config.streaming_chunks, config.num_return_sequences) == (
        64,
        16,
        1,
    )
    empty = ("pad_token_id", "bos_token_id", "eos_token_id", "partition_rules", "partition_axis")
    assert all(getattr(config, name) is None for name in empty)


def test_loop_rows_and_sampling_parameters_are_made() -> None:  # holds V21
    config = vInferenceConfig(max_new_tokens=33, streaming_chunks=16)
    assert config._loop_rows == 3
    assert config.sampling_params == SamplingParams(max_tokens=33)
    longer = config.replace(max_new_tokens=65)
    assert (longer._loop_rows, longer.sampling_params) == (5, SamplingParams(max_tokens=65))
    own = SamplingParams(top_k=3)
    kept = vInferenceConfig(sampling_params=own).replace(max_new_tokens=9)
    assert kept.sampling_params == own
    assert kept.sampling_params is not own, "later changes of the caller's object do not reach it"


def test_return_sequences_are_looked_up_by_hash() -> None:  # holds V22
    one, two = PreCompile(1, 16), PreCompile(2, 16)
    config = vInferenceConfig(num_return_sequences={one.get_default_hash(): 3})
    assert (config.sequences_for(one), config.sequences_for(two)) == (3, 1)
    assert vInferenceConfig(num_return_sequences=2).sequences_for(two) == 2
    assert vInferenceConfig(num_return_sequences=None).sequences_for(two) == 1
    with pytest.raises(ValueError, match="num_return_sequences"):
        vInferenceConfig(num_return_sequences=0)


def test_end_of_sequence_ids_are_one_or_many() -> (
    None
):  # holds V23 (that each one stops: test_vinference_generate)
    assert vInferenceConfig(eos_token_id=7).eos_token_ids == (7,)
    assert vInferenceConfig(eos_token_id=[7, 8, 7]).eos_token_ids == (7, 8)


def test_partition_rules_are_the_callers_or_made_from_the_axes() -> (
    None
):  # holds V24 (that every leaf matches: test_vinference_state)
    own = ((".*", PartitionSpec("x")),)
    assert vInferenceConfig(partition_rules=own).get_partition_rules() is own
    both = vInferenceConfig(partition_rules=own, partition_axis=PartitionAxis())
    assert both.get_partition_rules() is own
    with pytest.raises(AssertionError, match="partition_axis"):
        vInferenceConfig().get_partition_rules()
    rules = vInferenceConfig(
        partition_axis=PartitionAxis("b", "s", "ks", "h", "d")
    ).get_partition_rules(PreCompile())
    assert rules[0][1] == rules[1][1] == PartitionSpec("b", "s")
    assert all(spec == PartitionSpec("b", "ks", "h", "d") for _, spec in rules[2:5])
    assert rules[-1] == (".*", PartitionSpec())


def test_config_round_trips() -> None:  # holds V25
    config = vInferenceConfig(
        max_new_tokens=7,
        streaming_chunks=3,
        num_return_sequences={123: 2},
        pad_token_id=1,
        bos_token_id=4,
        eos_token_id=[2, 3],
        _loop_rows=5,
        partition_rules=(("a/b", PartitionSpec("x", None, ("y", "z"))), (".*", PartitionSpec())),
        partition_axis=PartitionAxis("b", "s", "k", "h", "d"),
        sampling_params=SamplingParams(temperature=0.5, stop=("a", "b"), repetition_penalty=1.5),
    )
    for field in dataclasses.fields(config):
        assert getattr(config, field.name) != field.default, "a default would hide its loss"
    assert vInferenceConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert vInferenceConfig.from_json(config.to_json()) == config
    assert config.replace(pad_token_id=9).pad_token_id == 9
    with pytest.raises(TypeError):
        config.replace(nothing=1)


def test_tuples_and_numpys_integers_become_what_json_gives_back() -> None:  # holds V15
    config = PreCompile(
        (np.int64(1), 2), np.int32(16), required_props={"a": {"x": (1, (2, np.int8(3)))}}
    )  # type: ignore[arg-type]
    assert config == PreCompile([1, 2], 16, required_props={"a": {"x": [1, [2, 3]]}})
    assert PreCompile.from_json(config.to_json()) == config
    made = vInferenceConfig(np.int64(9), np.int64(4), eos_token_id=(np.int64(1), 2))  # type: ignore[arg-type]
    assert (made._loop_rows, made.eos_token_ids) == (3, (1, 2))
    assert vInferenceConfig.from_json(made.to_json()) == made


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"eos_token_id": "x"}, "eos_token_id = 'x'. Allowed: token ids"),
        ({"eos_token_id": [1, None]}, "eos_token_id = None"),
        ({"pad_token_id": 1.5}, "pad_token_id = 1.5"),
        ({"sampling_params": 3}, "sampling_params of type int"),
        (
            {"sampling_params": {"temperature": -1}},
            r"^sampling_params: temperature = -1\. Allowed: a number of at least 0\. Leave",
        ),
        ({"sampling_params": {3: 1}}, "^the key 3 of sampling_params"),
        ({"num_return_sequences": {PreCompile(1, 16): 2}}, "get_default_hash"),
    ],
)
def test_values_of_another_type_are_refused_when_the_configuration_is_made(
    wrong: dict[str, object], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        vInferenceConfig(**wrong)  # type: ignore[arg-type]


def test_sampling_parameters_may_be_a_dict() -> None:
    config = vInferenceConfig(sampling_params={"temperature": 0.5})
    assert config.sampling_params == SamplingParams(temperature=0.5)
    assert vInferenceConfig.from_json(config.to_json()) == config


def test_precompile_flags_and_props_are_checked() -> None:
    with pytest.raises(ValueError, match="vision_included = 'yes'"):
        PreCompile(1, 16, "yes")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Allowed: numbers"):
        PreCompile(1, 16, required_props={"a": {"x": object()}}).get_default_hash()
