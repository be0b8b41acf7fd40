"""Generation configurations and runtime configurations of the DashInfer API."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import transformers

from enginebay.compose.plan import Plan
from enginebay.serving.segments import Segments
from enginebay_dashinfer.allspark import (
    AsCacheMode,
    ASGenerationConfigBuilder,
    AsModelConfig,
    AsModelRuntimeConfigBuilder,
    AsStatus,
    DashInferModel,
    Engine,
    MultiMediaInfo,
    TargetDevice,
)
from enginebay_dashinfer.planning import plan_model
from enginebay_dashinfer.sampling import to_sampling
from enginebay_dashinfer.statuses import RefusedError
from tests.unit.dashinfer.conftest import MAX_LENGTH, SUCCESS, Settings, greedy


def params_of(**fields: Any) -> Any:
    """The SamplingParams of a request with a prompt of 10 tokens in an engine of 100."""
    return to_sampling(fields, 10, 100).params


# holds D08
def test_every_call_of_the_builder_can_be_chained_and_builds_are_independent() -> None:
    builder = ASGenerationConfigBuilder(seed=3)
    first = builder.build()
    chained = (
        builder.do_sample()
        .max_length(512)
        .temperature(0.7)
        .top_k(50)
        .top_p(0.9)
        .seed(5)
        .min_length(2)
        .early_stopping()
        .eos_token_id(7)
        .stop_words_ids([[1, 2]])
        .no_repeat_ngram_size(3)
        .repetition_penalty(1.1)
        .presence_penalty(0.2)
        .frequency_penalty(0.3)
        .length_penalty(1.0)
        .suppress_repetition_in_generation()
        .log_probs(True, 4)
        .lora_name("a")
        .with_mm_info(None)
        .response_format({"type": "json_object"})
        .update({"top_k": 20})
    )
    assert chained is builder
    built = builder.build()
    assert (built["top_k"], built["logprobs"], built["top_logprobs"]) == (20, True, 4)
    assert first == {"do_sample": True, "early_stopping": True, "seed": 3}
    seeds = {ASGenerationConfigBuilder().build()["seed"] for _ in range(8)}
    assert len(seeds) > 1, "each builder draws a seed of its own"


# holds D08
def test_a_builder_takes_over_transformers_configuration() -> None:
    given = transformers.GenerationConfig(
        do_sample=False, temperature=0.5, top_k=7, top_p=0.8, eos_token_id=[4, 5], min_length=3
    )
    built = ASGenerationConfigBuilder(given, seed=1).build()
    assert built["do_sample"] is True
    assert (built["temperature"], built["top_k"], built["top_p"]) == (0.5, 7, 0.8)
    assert (built["eos_token_id"], built["stop_words_ids"]) == (4, [[5]])
    params = to_sampling(built, 10, 100).params
    assert (params.min_tokens, params.stop_token_ids) == (3, (4,))
    with pytest.raises(ValueError, match="num_return_sequences"):
        ASGenerationConfigBuilder({"num_return_sequences": 2})


SCHEMA = '{"type": "object"}'
FIELDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "max_tokens": 90, "min_tokens": 0}),
    ({"do_sample": False}, {"temperature": 0.0, "top_k": 0}),
    ({"temperature": 0.3}, {"temperature": 0.3}),
    ({"temperature": 1e-9}, {"temperature": 0.0}),
    ({"top_p": 0.0}, {"temperature": 0.0}),
    ({"top_p": 0.4}, {"top_p": 0.4}),
    ({"top_p": 1.0}, {"top_p": 1.0}),
    ({"top_k": 0}, {"top_k": 0}),
    ({"top_k": 7}, {"top_k": 7}),
    ({"max_length": 30}, {"max_tokens": 20}),
    ({"max_length": 100}, {"max_tokens": 90}),
    ({"min_length": 4}, {"min_tokens": 4}),
    ({}, {"ignore_eos": False, "stop_token_ids": ()}),
    ({"early_stopping": False}, {"ignore_eos": True, "stop_token_ids": ()}),
    ({"early_stopping": False, "eos_token_id": 3}, {"ignore_eos": True, "stop_token_ids": ()}),
    ({"eos_token_id": 3}, {"ignore_eos": True, "stop_token_ids": (3,)}),
    ({"stop_words_ids": [[1, 2], [3]]}, {"stop_words_ids": ((1, 2), (3,))}),
    ({"no_repeat_ngram_size": 2}, {"no_repeat_ngram_size": 2}),
    ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
    ({"presence_penalty": 0.5}, {"presence_penalty": 0.5}),
    ({"frequency_penalty": 0.25}, {"frequency_penalty": 0.25}),
    ({"length_penalty": 2.0}, {"repetition_penalty": 1.0, "max_tokens": 90}),
    (
        {"suppress_repetition_in_generation": True, "repetition_penalty": 1.5},
        {"suppress_repetition_in_generation": True, "repetition_penalty": 1.5},
    ),
    ({"seed": 2**62}, {"seed": 2**62}),
    ({"seed": -1}, {"seed": 2**63 - 1}),
    ({"seed": 0}, {"seed": 0}),
    ({}, {"seed": None, "logprobs": None}),
    ({"logprobs": True}, {"logprobs": 0}),
    ({"logprobs": True, "top_logprobs": 3}, {"logprobs": 3}),
    ({"bad_words_ids": [[4]]}, {"processors": {"bad_words": {"sequences": [[4]]}}}),
    ({"response_format": {"type": "json_object"}}, {"json_object": True, "json_schema": None}),
    (
        {"response_format": {"type": "json_object", "json_schema": SCHEMA}},
        {"json_schema": SCHEMA},
    ),
]


# holds D09
@pytest.mark.parametrize(("fields", "expected"), FIELDS)
def test_a_field_becomes_a_sampling_parameter(
    fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    params = params_of(**fields).model_dump()
    assert {name: params[name] for name in expected} == expected


# holds D09
def test_an_adapter_and_embeddings_are_chosen_by_their_fields() -> None:
    media = MultiMediaInfo()
    made = to_sampling({"lora_name": "a", "mm_info": media}, 1, 9)
    assert (made.lora, made.media) == ("a", media)
    plain = to_sampling({"lora_name": ""}, 1, 9)
    assert (plain.lora, plain.media) == (None, None)


# holds D09
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 1.5),
        ("top_p", -0.1),
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("do_sample", 1),
        ("num_beams", 2),
        ("seed", "a"),
        ("top_logprobs", 3),
        ("length_penalty", "long"),
        ("repetition_penalty", 0.0),
        ("stop_words_ids", [[]]),
        ("response_format", {"type": "xml"}),
        ("response_format", {"type": "json_object", "schema": "{}"}),
        ("response_format", "json_object"),
        ("lora_name", 5),
        ("mm_info", {}),
        ("topk", 3),
    ],
)
def test_a_wrong_value_is_a_parameter_error(running: Engine, field: str, value: object) -> None:
    status, handle, results = running.start_request_ids("one", None, [1], greedy(**{field: value}))
    assert (status, handle, results) == (AsStatus.ALLSPARK_PARAM_ERROR, None, None)
    assert field.split("_", maxsplit=1)[0] in running.last_error


def test_a_length_without_room_is_refused_with_its_status() -> None:
    for fields in ({"max_length": 10}, {"max_length": 101}):
        with pytest.raises(RefusedError) as caught:
            to_sampling(fields, 10, 100)
        assert caught.value.status is AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR


# holds D04
def test_runtime_builder_sets_every_field_and_builds_are_independent() -> None:
    builder = AsModelRuntimeConfigBuilder().model_name("m").model_dir("/models", "x")
    builder.compute_unit(TargetDevice.CUDA, [0, 1]).max_batch(8).max_length(512)
    builder.max_prefill_length(64).kv_cache_mode(AsCacheMode.AsCacheQuantU4)
    builder.kv_cache_span_size(16).prefill_cache(False).prefix_cache_ttl(7)
    built = builder.lora_max_num(2).lora_max_rank(8).build()
    assert built == AsModelConfig(
        "m", "/models/x.asgraph", "/models/x.asparam", "CUDA:0,1", 0, 512, 8, 64, 16,
        AsCacheMode.AsCacheQuantU4, False, 7, 2, 8,
    )  # fmt: skip
    builder.max_batch(1)
    assert built.engine_max_batch == 8
    builder.build().engine_max_batch = 99
    assert builder.build().engine_max_batch == 1
    defaults = AsModelRuntimeConfigBuilder().build()
    assert (defaults.prefix_cache_ttl, defaults.lora_max_num, defaults.lora_max_rank) == (
        300,
        5,
        64,
    )
    assert defaults.enable_prefix_cache


# holds D04
def test_runtime_builder_reads_mappings() -> None:
    fields = {
        "model_name": "m",
        "compute_unit": {"device_type": "cpu", "device_ids": [0], "compute_thread_in_device": 0},
        "engine_max_length": "64",
        "engine_max_batch": 2,
        "engine_max_prefill_length": 32,
        "kv_cache_mode": "AsCacheQuantI8",
        "kv_cache_span_size": 32,
        "enable_prefix_cache": False,
    }
    built = AsModelRuntimeConfigBuilder().from_dict(fields).build()
    assert (built.compute_unit, built.engine_max_length) == ("CPU:0", 64)
    assert (built.engine_max_prefill_length, built.cache_mode) == (32, AsCacheMode.AsCacheQuantI8)
    builder = AsModelRuntimeConfigBuilder().max_batch(3)
    for wrong in ({"engine_max_batch": 9, "max": 1}, {"engine_max_batch": 9, "kv_cache_mode": "x"}):
        with pytest.raises(ValueError, match="Allowed"):
            builder.update_from_dict(wrong)
        assert builder.build().engine_max_batch == 3, "nothing of it is set"
    with pytest.raises(ValueError, match="engine_max_length"):
        AsModelRuntimeConfigBuilder().from_dict({"model_name": "m"})


FIELD_PLACES: list[tuple[str, Any, str, Any]] = [
    ("model_name", "m", "model_name", "m"),
    ("engine_max_length", 64, "engine_max_length", 64),
    ("engine_max_batch", 3, "engine_max_batch", 3),
    ("engine_max_prefill_length", 48, "engine_max_prefill_length", 48),
    ("kv_cache_mode", "AsCacheQuantI8", "cache_mode", AsCacheMode.AsCacheQuantI8),
    ("kv_cache_span_size", 64, "cache_span_size", 64),
    ("enable_prefix_cache", False, "enable_prefix_cache", False),
    ("prefix_cache_ttl", 9, "prefix_cache_ttl", 9),
    ("lora_max_num", 1, "lora_max_num", 1),
    ("lora_max_rank", 8, "lora_max_rank", 8),
    ("compute_unit", "CPU_NUMA:0", "compute_unit", "CPU_NUMA:0"),
    ("compute_unit", {"device_type": "cuda", "device_ids": [0, 1]}, "compute_unit", "CUDA:0,1"),
    ("compute_unit", {"device_type": "cpu", "compute_thread_in_device": 4}, "num_threads", 4),
]


# holds D04
@pytest.mark.parametrize(("field", "value", "name", "expected"), FIELD_PLACES)
def test_each_field_of_a_mapping_is_set(field: str, value: Any, name: str, expected: Any) -> None:
    built = AsModelRuntimeConfigBuilder().update_from_dict({field: value}).build()
    assert getattr(built, name) == expected != getattr(AsModelConfig(), name)


# holds D04
def test_files_can_be_set_by_folder_or_one_by_one() -> None:
    builder = AsModelRuntimeConfigBuilder().model_file_path("/a/x.asgraph", "/b/y.asparam")
    built = builder.build()
    assert (built.model_path, built.weights_path) == ("/a/x.asgraph", "/b/y.asparam")
    built = builder.model_dir("/models", "z").compute_unit(TargetDevice.CPU, [3], 2).build()
    assert (built.model_path, built.weights_path) == ("/models/z.asgraph", "/models/z.asparam")
    assert (built.compute_unit, built.num_threads) == ("CPU:0", 2)


# holds D04
def test_each_setting_reaches_the_plan_of_the_model(settings: Settings) -> None:
    def planned(**changes: Any) -> Plan:
        return plan_model(settings(**changes))

    config = planned().config
    assert (config.max_model_len, config.max_num_seqs) == (MAX_LENGTH, 4)
    assert (config.max_num_batched_tokens, config.max_loras) == (16, 0)
    options = config.engine.options
    assert (options["page_size"], options["prefix_ttl_s"]) == (16, 300)
    assert options["enable_prefix_caching"] is True
    changed = planned(
        enable_prefix_cache=False, prefix_cache_ttl=7, lora_max_num=2, lora_max_rank=4
    )
    options = changed.config.engine.options
    assert (options["enable_prefix_caching"], options["prefix_ttl_s"]) == (False, 7)
    assert (changed.config.max_loras, changed.config.max_lora_rank) == (2, 4)
    assert changed.adapters is not None
    for mode, dtype in (("AsCacheQuantI8", "int8"), ("AsCacheQuantU4", "uint4")):
        (attention,) = set(planned(kv_cache_mode=mode).model.info.attention.values())
        assert attention.cache_dtype == dtype


# holds D04
@pytest.mark.parametrize(
    ("call", "values"),
    [
        ("model_name", [""]),
        ("compute_unit", ["TPU"]),
        ("compute_unit", [TargetDevice.CPU, [-1]]),
        ("max_length", [1]),
        ("max_batch", [0]),
        ("max_batch", [True]),
        ("kv_cache_mode", ["int8"]),
        ("kv_cache_span_size", [48]),
        ("prefix_cache_ttl", [0]),
        ("lora_max_rank", ["x"]),
    ],
)
def test_runtime_builder_refuses_wrong_values(call: str, values: list[Any]) -> None:
    with pytest.raises(ValueError, match="Allowed"):
        getattr(AsModelRuntimeConfigBuilder(), call)(*values)


# holds D03
def test_reference_builders_fit_the_model_and_the_engine(loader: DashInferModel) -> None:
    longest = loader.get_model_context_length()
    call = loader.create_reference_runtime_config_builder
    config = call("m", TargetDevice.CPU, [0], 8).build()
    assert (config.engine_max_length, config.engine_max_batch) == (longest, 8)
    assert (config.model_path, config.weights_path) == tuple(map(str, loader.files()))
    short = call("m", TargetDevice.CPU, [0], 8, 64).build()
    assert short.engine_max_length == 64
    reference = loader.create_reference_generation_config_builder
    assert reference(short).build()["max_length"] == 64
    assert reference(config).build()["max_length"] == longest
    assert reference().build()["eos_token_id"] in loader.checkpoint.token_info.eos_token_ids


# holds D18
def test_embeddings_take_the_places_of_their_placeholders() -> None:
    media = MultiMediaInfo()
    one, two = np.ones((2, 4), np.float32), np.full((1, 4), 2, np.float32)
    assert media.add_multimedia_content("9", [one]) is AsStatus.ALLSPARK_SUCCESS
    assert media.add_multimedia_content(9, [jnp.asarray(two)]) is AsStatus.ALLSPARK_SUCCESS
    made = media.segments([5, 9, 9, 6, 9])
    assert isinstance(made, Segments)
    kinds = [s.tolist() if isinstance(s, np.ndarray) else s for s in made.segments]
    assert kinds == [[5], one.tolist(), [6], two.tolist()]
    with pytest.raises(ValueError, match="placeholder 9"):
        media.segments([5, 9])
    for key, values in (("x", [one]), (-1, [one]), (9, []), (9, [np.ones(4)]), (9, ["a"])):
        assert media.add_multimedia_content(key, values) is AsStatus.ALLSPARK_PARAM_ERROR


# holds D18
def test_texts_take_no_embeddings(running: Engine) -> None:
    media = MultiMediaInfo()
    media.add_multimedia_content(9, [np.ones((1, 4), np.float32)])
    call = running.start_request_text
    assert call("one", None, "a", greedy(mm_info=media))[0] is AsStatus.ALLSPARK_PARAM_ERROR
    assert "mm_info" in running.last_error


# holds D20
def test_figures_of_a_model_follow_its_requests(running: Engine) -> None:
    before = running.get_as_engine_stat("one")
    assert before.total_span == before.free_span > 0
    assert before.span_size == 16
    _, handle, _ = running.start_request_ids("one", None, [5] * 40, greedy(max_length=60))
    assert running.sync_request("one", handle) is SUCCESS
    after = running.get_as_engine_stat("one")
    assert (after.total_generated_token, after.total_prefill_token) == (20, 40)
    assert (after.prefix_cache_miss_token, after.prefix_cache_hit_token) == (40, 0)
    assert after.ToMap()["model_name"] == "one"
    assert "decode" in running.get_op_profiling_info("one")
    with pytest.raises(ValueError, match="'other'"):
        running.get_as_engine_stat("other")
