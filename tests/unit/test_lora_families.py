"""Adapters on every family: fused weights, short convolutions, latent attention and experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginebay import LLM
from enginebay.compose.composition import make_plan
from enginebay.config import EngineConfig
from enginebay.errors import CheckpointError
from tests.adapters import TARGETS, write_adapter, write_merged
from tests.parity import tiny
from tests.unit.test_lora_batches import TOLERANCE, rows_of

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LAYERS: dict[str, tuple[str, ...]] = {
    "llama-biases": TARGETS,
    "mistral-window": TARGETS,
    "qwen2-tied": TARGETS,
    "gemma3-untied": TARGETS,
    "mpt-six-heads": ("Wqkv", "out_proj", "up_proj", "down_proj"),
    "lfm2-biases": ("in_proj", "out_proj", "q_proj", "k_proj", "v_proj", "w1", "w2", "w3"),
    "qwen3_moe-some-plain": ATTENTION,
    "cohere-one": TARGETS,
    "glm4-one": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"),
    "gpt_neox-one": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    "falcon-one": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    "olmo2-one": TARGETS,
    "opt-one": ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"),
    "phi3-one": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "deepseek_v2-grouped": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"),
}
NAMES = ["a", None, "b", "a", "b", None]
PROMPTS = [
    np.random.default_rng(n).integers(0, tiny.VOCAB_SIZE, n).tolist()
    for n in (1, 9, 20, 40, 70, 90)
]
SIZES: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 64,
    "generation_config": "none",
}


@pytest.mark.slow
@pytest.mark.usefixtures("few_sizes_module")
@pytest.mark.parametrize("variant", LAYERS)
def test_rows_of_a_batch_are_as_alone_on_merged_weights(variant: str, tmp_path: Path) -> None:
    model = tiny.write_checkpoint(tmp_path / "model", variant)
    adapters = {
        name: write_adapter(
            tmp_path / name, model, seed=seed, rank=3 + seed, targets=LAYERS[variant], scale=1.5
        )
        for seed, name in enumerate("ab")
    }
    lora = {name: str(folder) for name, folder in adapters.items()}
    with LLM(str(model), **SIZES, lora=lora) as llm:
        found = rows_of(llm, PROMPTS, NAMES)
    for name in (None, *adapters):
        merged = (
            model if name is None else write_merged(tmp_path / f"m-{name}", model, adapters[name])
        )
        with LLM(str(merged), **SIZES) as llm:
            expected = rows_of(llm, PROMPTS)
        for i, (row, other) in enumerate(zip(found, expected, strict=True)):
            if NAMES[i] == name:
                assert row[0] == other[0]
                np.testing.assert_allclose(row[1], other[1], atol=TOLERANCE)
            else:
                assert np.abs(np.subtract(row[1], other[1])).max() > TOLERANCE


@pytest.mark.parametrize("variant", ["qwen3_moe-some-plain", "deepseek_v2-grouped"])
def test_adapters_on_experts_are_refused_by_name(variant: str, tmp_path: Path) -> None:
    model = tiny.write_checkpoint(tmp_path / "model", variant)
    adapter = write_adapter(tmp_path / "a", model, targets=["up_proj"])
    fields: dict[str, Any] = {"dtype": "float32", "lora": {"a": str(adapter)}}
    with pytest.raises(
        CheckpointError, match=r"layer 'model\.layers\.1\.mlp\.experts\.0\.up_proj'"
    ):
        make_plan(EngineConfig(model=str(model), **fields))
