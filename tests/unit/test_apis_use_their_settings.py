"""The APIs with steps of their own refuse the parts of a configuration that they would not use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from enginebay.config import EngineConfig
from enginebay.errors import ConfigError
from enginebay_oengine.opened_model import open_model
from enginebay_shared.opening import OF_LLM, OWN_PARTS
from enginebay_vinference.loaded_model import make_loaded_model

APIS: dict[str, Callable[[Any], Any]] = {
    "oengine": open_model,
    "vinference": make_loaded_model,
}


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(
    ("setting", "value"),
    [("scheduler", "priority"), ("proposer", "ngram"), ("executor", "mine:Executor")],
)
def test_a_part_that_an_api_would_not_use_is_refused_by_name(
    api: str, setting: str, value: str
) -> None:
    with pytest.raises(ConfigError, match=f"{setting} = {value!r} for .*would not use it"):
        APIS[api]({"model": "demo", setting: value})


OTHER_VALUES: dict[str, Any] = {
    "capture": {"file": "calls.trace"},
    "decode_steps": 4,
    "draft_tokens": 3,
    "dump_step": "step",
    "embeddings": True,
    "forbid_compiling": True,
    "full_vocab_logprobs": True,
    "generation_config": "none",
    "grammars": "llguidance",
    "guided_limits": {"items": 10},
    "idle_release_s": 5.0,
    "lora": {"a": "folder"},
    "lora_targets": ["q_proj"],
    "max_cpu_loras": 4,
    "max_lora_rank": 8,
    "max_loras": 2,
    "mixed_steps": "on",
    "overlap_execution": False,
    "prompt_embeds": True,
    "seed": 5,
    "shadow": {"linear": "xla"},
    "stream_chunk_tokens": 3,
}
READ = {
    *("activation_quantization", "axis_rules", "checkpoint", "compile_cache", "dtype", "engine"),
    *(
        "interpret",
        "kernels",
        "kv_cache_dtype",
        "layout",
        "max_model_len",
        "max_num_batched_tokens",
    ),
    *("max_num_seqs", "mesh", "model", "platform", "processors", "quantization", "sampler"),
    *("special_tokens_in_text", "template_limits", "tuned", "tuned_folder", "verify_kernels"),
    *("verify_weights", "weight_dtype"),
}
"""What the plan, the weights, the cache and the tokenizer of these APIs are made of."""


def test_each_setting_is_read_or_refused() -> None:
    assert OTHER_VALUES.keys() == OF_LLM
    assert set(EngineConfig.model_fields) == READ | OF_LLM | OWN_PARTS.keys()
    assert not READ & OF_LLM


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("setting", OTHER_VALUES)
def test_a_setting_that_an_api_would_not_use_is_refused_by_name(api: str, setting: str) -> None:
    if (api, setting) == ("vinference", "generation_config"):
        pytest.skip("it reads the checkpoint's sampling")
    with pytest.raises(ConfigError, match=f"{setting} = .* for .*which would not use it"):
        APIS[api]({"model": "demo", setting: OTHER_VALUES[setting]})


def test_usual_parts_may_be_named() -> None:
    usual = {"scheduler": "fcfs", "proposer": "none", "executor": "local"}
    opened = open_model({"model": "demo", "max_model_len": 64, **usual})
    assert opened.plan.config.scheduler.name == "fcfs"
