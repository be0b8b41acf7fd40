"""eSurge's constructor: the documented defaults, where each option goes, and what is refused."""

from __future__ import annotations

import inspect
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from enginebay.errors import ConfigError, UnsupportedError
from enginebay_esurge import eSurge
from enginebay_esurge.context import ContextRules
from enginebay_esurge.opening import max_shards, prepare_model
from enginebay_esurge.settings import EngineSettings, mesh_of
from enginebay_models.checkpoint import find_folder
from tests.fake_engine import FakeEngine
from tests.unit.esurge.small import BUDGET, GREEDY, GREEDY_ON, PROMPTS, token_ids

DOCUMENTED: dict[str, Any] = {
    "tokenizer": None,
    "dtype": jnp.bfloat16,
    "max_model_len": 8192,
    "min_input_pad": 16,
    "max_num_seqs": 256,
    "max_num_batched_tokens": None,
    "hbm_utilization": 0.85,
    "page_size": 128,
    "use_aot_forward": True,
    "enable_prefix_caching": True,
    "auto_shard_model": True,
    "sharding_axis_dims": (1, 1, 1, -1, 1),
    "compile_runner": True,
    "runner_verbose": False,
    "overlap_execution": False,
    "sampler_metrics": False,
    "esurge_name": None,
    "reserve_tokens": None,
    "auto_truncate_prompt": True,
    "auto_cap_new_tokens": True,
    "strict_context": False,
    "truncate_mode": "left",
    "prefer_preserve_prompt": True,
    "decode_truncated_prompt": True,
    "destroy_pages_on_pause": True,
    "detokenizer_max_states": 65536,
    "tokenizer_endpoint": None,
    "detokenizer_endpoint": None,
    "sampling_params_callback": None,
    "extra_eos_token_ids": None,
    "silent_mode": False,
}


def settings(**changes: Any) -> EngineSettings:
    fields = set(EngineSettings.__dataclass_fields__) - {"more"}
    values = {name: changes.get(name, DOCUMENTED[name]) for name in fields}
    return EngineSettings(**values, more={k: v for k, v in changes.items() if k not in fields})


def test_constructor_has_the_documented_options_and_defaults() -> None:  # holds S03
    parameters = inspect.signature(eSurge).parameters
    assert list(parameters) == ["model", *DOCUMENTED, "kwargs"]
    assert {name: parameters[name].default for name in DOCUMENTED} == DOCUMENTED


def test_options_reach_the_paged_engine_as_they_are() -> None:  # holds S03
    config = settings(
        dtype=jnp.float32,
        max_model_len=512,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        hbm_utilization=0.5,
        enable_prefix_caching=False,
        overlap_execution=True,
        decode_steps=4,
        engine_options={"prefix_ttl_s": 9.0},
    ).config("demo", 1024, 1, 1)
    assert (config.dtype, config.max_model_len, config.max_num_seqs) == ("float32", 512, 8)
    assert (config.max_num_batched_tokens, config.decode_steps, config.forbid_compiling) == (
        64,
        4,
        True,
    )
    assert (config.overlap_execution, settings().config("demo", 1024, 1, 1).overlap_execution) == (
        True,
        False,
    )
    assert config.engine.name == "oengine"
    wanted = {
        "page_size": 128,
        "prefix_caching": False,
        "memory_utilization": 0.5,
        "prefix_ttl_s": 9.0,
    }
    assert config.engine.options == wanted, "the page size is not another one where there is no TPU"
    assert settings(use_aot_forward=False).config("demo", 1024, 1, 1).forbid_compiling is False
    assert settings().config("demo", 1024, 1, 1).max_model_len == 1024, (
        "the default is at most the model's own"
    )
    assert settings().config("demo", 10_000, 1, 1).max_model_len == 8192
    assert (
        settings(engine_options={"num_pages": 9})
        .config("demo", 64, 1, 1)
        .engine.options["num_pages"]
        == 9
    )


def test_devices_go_along_the_axis_that_can_be_split() -> None:  # holds S03
    assert mesh_of((1, 1, 1, -1, 1), 4, 4) == {"tensor": 4}
    assert mesh_of((1, 1, 1, 2, 1), 4, 4) == {"tensor": 2}
    assert mesh_of((1, 1, 1, -1, 1), 4, 2) == {"tensor": 2}, "what the model can be split over"
    assert settings(auto_shard_model=False).config("demo", 64, 4, 4).mesh == {}
    assert mesh_of((-1, 1, 1, 1, 1), 1, 1) == {}
    plan = prepare_model("demo", None, settings(auto_shard_model=False)).plan
    assert [max_shards(plan, n) for n in (1, 2, 3, 4, 6, 8)] == [1, 2, 2, 2, 2, 2], (
        "it has 2 KV heads, and 448 features"
    )
    with pytest.raises(UnsupportedError, match="dp"):
        mesh_of((-1, 1, 1, 1, 1), 4, 1)
    for wrong in ((1, 1), (1, 1, 1, 0, 1), (-1, 1, 1, -1, 1)):
        with pytest.raises(ConfigError):
            mesh_of(wrong, 4, 4)


UNUSED: dict[str, Any] = {
    "min_input_pad": 32,
    "detokenizer_max_states": 16,
    "tokenizer_endpoint": "tcp://127.0.0.1:9",
    "detokenizer_endpoint": "ipc:///tmp/detokenizer",
}


def test_documented_options_that_change_no_answer_are_taken(
    make_faked: Callable[..., eSurge], caplog: pytest.LogCaptureFixture
) -> None:  # holds S03
    with make_faked() as plain:
        expected = token_ids(plain.generate(PROMPTS, GREEDY))
    with caplog.at_level(logging.INFO, "enginebay.esurge"), make_faked(**UNUSED) as engine:
        assert token_ids(engine.generate(PROMPTS, GREEDY)) == expected
    for option, value in UNUSED.items():
        assert f"{option} = {value!r} changes nothing here" in caplog.text


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("min_input_pad", 0),
        ("min_input_pad", "16"),
        ("detokenizer_max_states", True),
        ("tokenizer_endpoint", 9),
        ("detokenizer_endpoint", ""),
    ],
)
def test_wrong_values_of_options_without_an_effect_are_refused(option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=option):
        eSurge("demo", **{option: value})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_model_len": 512, "reserve_tokens": 512}, "reserve_tokens"),
        ({"reserve_tokens": 1024}, "reserve_tokens"),
        ({"page_size": 100}, "page_size"),
        ({"sharding_axis_dims": (1, 1, 1, 2, 1)}, "auto_shard_model"),
        ({"max_model_len": 4000}, "max_model_len"),
        ({"no_such_thing": 1}, "no_such_thing"),
        ({"forbid_compiling": True}, "forbid_compiling"),
        ({"dtype": object()}, "dtype"),
        ({"tokenizer": 7}, "tokenizer"),
        ({"extra_eos_token_ids": [1 << 20]}, "extra_eos_token_ids"),
        ({"truncate_mode": "centre"}, "truncate_mode"),
    ],
)
def test_wrong_values_are_value_errors_before_anything_is_loaded(
    options: dict[str, Any], words: str
) -> None:  # holds S03
    with pytest.raises(ValueError, match=words):
        eSurge("demo", **({"auto_shard_model": False} | options))


def test_each_option_of_the_constructor_goes_where_it_belongs(
    make_faked: Callable[..., eSurge],
) -> None:  # holds S03
    rules: dict[str, Any] = {
        "reserve_tokens": 7,
        "auto_truncate_prompt": False,
        "auto_cap_new_tokens": False,
        "strict_context": True,
        "truncate_mode": "right",
        "prefer_preserve_prompt": False,
    }
    fields = {
        "dtype": "float16",
        "max_model_len": 96,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 48,
        "overlap_execution": True,
    }
    engine = make_faked(
        **rules,
        **fields,
        page_size=32,
        hbm_utilization=0.5,
        enable_prefix_caching=False,
        engine_options={},
        compile_runner=False,
        extra_eos_token_ids=[5],
    )
    config = engine.plan.config
    assert {name: getattr(config, name) for name in fields} == fields
    assert config.engine.options == {
        "page_size": 32,
        "memory_utilization": 0.5,
        "prefix_caching": False,
    }
    assert engine._jobs.rules == ContextRules(96, **rules)
    assert 5 in engine._jobs._preparer.tokens.eos_token_ids
    assert (config.forbid_compiling, engine.engine.compilations.forbidden) == (False, False)
    later = make_faked(use_aot_forward=False).plan.config
    assert (later.forbid_compiling, make_faked().plan.config.forbid_compiling) == (False, True)


def test_name_callback_and_text_of_a_cut_prompt_are_the_callers(
    make_faked: Callable[..., eSurge],
) -> None:  # holds S03, S11
    text = "the little fox " * 80
    names: list[str] = []
    with make_faked(
        esurge_name="mine",
        decode_truncated_prompt=False,
        sampling_params_callback=lambda _, about: names.append(about["engine"].esurge_name),
    ) as engine:
        output = engine.generate(text, GREEDY_ON)[0]
    assert names == ["mine"]
    assert len(output.prompt_token_ids) == BUDGET - 16
    assert output.prompt == text, "the prompt as it was given"


def test_verbose_runners_log_and_silent_engines_show_nothing(
    make_faked: Callable[..., eSurge],
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # holds S03
    def warmup(_: object, progress: Callable[[int, int, str], None]) -> int:
        progress(1, 1, "a step")
        return 1

    monkeypatch.setattr(FakeEngine, "warmup", warmup)
    found = []
    for options in (
        {},
        {"runner_verbose": True},
        {"silent_mode": True},
        {"runner_verbose": True, "silent_mode": True},
    ):
        caplog.clear()
        capsys.readouterr()
        with caplog.at_level(logging.INFO, "enginebay.esurge"), make_faked(**options) as engine:
            logs = any("compiled" in record.getMessage() for record in caplog.records)
            monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
            engine.generate(PROMPTS, GREEDY_ON)
        found.append((logs, "generating" in capsys.readouterr().err))
    assert found == [(False, True), (True, True), (False, False), (False, False)]


class Named:
    """A tokenizer that names its ends of sequence."""

    def __init__(self, eos_token_id: Any, inner: Any) -> None:
        self.eos_token_id = eos_token_id
        self.encode, self.decode = inner.encode, inner.decode


def test_ends_of_sequence_are_the_models_the_tokenizers_and_the_extra_ones() -> None:  # holds S13
    plain = prepare_model("demo", None, settings(auto_shard_model=False)).tokenizer.inner
    for ends in (2, [2, 7], None):
        inner = Named(ends, plain)
        preparer = prepare_model("demo", inner, settings(auto_shard_model=False)).make_preparer([9])
        own = [ends] if isinstance(ends, int) else ends or []
        assert set(preparer.tokens.eos_token_ids) == {0, 2, 9, *own}


def test_the_default_name_is_type_and_size() -> None:  # holds S11
    subject = prepare_model("demo", None, settings(auto_shard_model=False))
    assert subject.default_name() == "llama-0.00b"


def test_the_default_context_is_one_at_which_no_rotary_frequency_is_stretched(
    tmp_path: Path,
) -> None:
    demo = find_folder("demo")
    config = json.loads((demo / "config.json").read_text())
    config |= {
        "max_position_embeddings": 128,
        "rope_parameters": {"rope_type": "dynamic", "factor": 4.0},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((demo / name).read_bytes())
    found = [
        prepare_model(
            str(tmp_path), None, settings(auto_shard_model=False, **sizes)
        ).plan.config.max_model_len
        for sizes in ({}, {"max_model_len": 200})
    ]
    assert found == [128, 200]
