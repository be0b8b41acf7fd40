"""The fields of adapter_config.json: read, neutral, or refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginebay.compose.composition import make_plan
from enginebay.config import EngineConfig
from enginebay.errors import CheckpointError
from enginebay_lora.layers import AdaptedLayer
from enginebay_lora.model import LoraModel
from enginebay_lora.peft import read_adapter
from enginebay_lora.peft_fields import FIELDS, NEUTRAL, PLAIN, READ
from tests.adapters import change_config, write_adapter
from tests.brief import TINY

Layers = Mapping[str, AdaptedLayer]


@pytest.fixture(scope="module")
def layers() -> Layers:
    """The layers of TINY, which may have adapters of rank 8."""
    plan = make_plan(EngineConfig(model=TINY, dtype="float32", max_loras=2, max_lora_rank=8))
    assert isinstance(plan.model, LoraModel)
    return plan.model.layers


def read(folder: Path, layers: Layers) -> dict[str, np.ndarray]:
    return read_adapter(folder, layers, 8, np.dtype(np.float32))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type = 'IA3'. Allowed: LORA"),
        ({"bias": "all"}, "bias = 'all'. Allowed: bias = 'none'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save = ['lm_head']"),
        ({"use_dora": True}, "use_dora = True"),
        ({"use_dora": 1}, "use_dora = 1"),
        ({"use_qalora": True}, "use_qalora = True"),
        ({"kasa_config": {"beta": 1e-4}}, "kasa_config = {'beta': 0.0001}"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora = {'nblocks': 2}"),
        ({"arrow_config": {"top_k": 3}}, "arrow_config = {'top_k': 3}"),
        ({"monteclora_config": {"num_samples": 8}}, "monteclora_config ="),
        ({"enable_lora": [True]}, "enable_lora = [True]"),
        ({"init_lora_weights": "newer"}, "init_lora_weights = 'newer'"),
        ({"use_of_tomorrow": 2}, "use_of_tomorrow = 2, a field that is not known"),
        ({"ensure_weight_tying": "yes"}, "ensure_weight_tying = 'yes'"),
        ({"rank_pattern": {"q_.*": 2}}, "rank_pattern with the key 'q_.*'"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern['q_proj'] = 0"),
        ({"alpha_pattern": {"q_proj": "4"}}, "alpha_pattern['q_proj'] = '4'"),
        ({"alpha_pattern": [1]}, "alpha_pattern = [1]"),
        ({"r": 0}, "r = 0"),
        ({"r": 3}, "has shape"),
        ({"lora_alpha": None}, "lora_alpha = None"),
        ({"use_rslora": "yes"}, "use_rslora = 'yes'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_field_that_slots_cannot_hold_is_refused_by_name(
    layers: Layers, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    folder = change_config(write_adapter(tmp_path / "a", TINY, targets=["q_proj"]), **fields)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        read(folder, layers)


@pytest.mark.parametrize(
    "value",
    ["pissa", "pissa_niter_4", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga"],
)
def test_an_adapter_whose_training_changed_the_base_is_refused(
    layers: Layers, tmp_path: Path, value: str
) -> None:
    adapter = write_adapter(tmp_path / "a", TINY, targets=["q_proj"], init_lora_weights=value)
    with pytest.raises(CheckpointError, match=f"init_lora_weights = '{value}'") as info:
        read(adapter, layers)
    assert "path_initial_model_for_weight_conversion" in str(info.value)


@pytest.mark.parametrize(
    "fields",
    [
        *({"init_lora_weights": one} for one in (True, False, None, "gaussian", "eva")),
        *({"init_lora_weights": one} for one in ("orthogonal", "mica")),
        {"loftq_config": {}, "eva_config": None, "corda_config": None, "lora_ga_config": None},
        {"velora_config": {"num_groups": 64}, "lora_dropout": 0.1, "qalora_group_size": 16},
        {"ensure_weight_tying": True},
        {"feature_of_tomorrow": None, "switch_of_tomorrow": False},
    ],
    ids=str,
)
def test_a_field_that_changes_no_logits_is_taken(
    layers: Layers, tmp_path: Path, fields: dict[str, Any]
) -> None:
    plain = read(write_adapter(tmp_path / "a", TINY, targets=["q_proj"]), layers)
    same = read(write_adapter(tmp_path / "b", TINY, targets=["q_proj"], **fields), layers)
    assert plain.keys() == same.keys()
    assert all(np.array_equal(one, same[path]) for path, one in plain.items())


PEFT_FIELDS = """
    task_type peft_type auto_mapping peft_version base_model_name_or_path revision inference_mode r
    target_modules exclude_modules lora_alpha lora_dropout fan_in_fan_out bias use_rslora
    modules_to_save init_lora_weights layers_to_transform layers_pattern rank_pattern alpha_pattern
    megatron_config megatron_core trainable_token_indices loftq_config eva_config corda_config
    lora_ga_config use_dora velora_config alora_invocation_tokens use_qalora qalora_group_size
    monteclora_config layer_replication runtime_config lora_bias target_parameters use_bdlora
    arrow_config kasa_config ensure_weight_tying
"""
"""The fields of LoraConfig in PEFT 0.21.2."""


def test_each_field_of_peft_is_read_neutral_or_refused() -> None:
    assert set(PEFT_FIELDS.split()) <= FIELDS
    assert FIELDS - set(PEFT_FIELDS.split()) == {"enable_lora", "merge_weights"}  # of PEFT 0.2
    assert not READ & NEUTRAL
    assert not (READ | NEUTRAL) & PLAIN.keys()
