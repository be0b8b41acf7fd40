"""Adapters that PEFT makes and saves, against PEFT's own models on torch: logits and tokens."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginebay import LLM, SamplingParams
from enginebay_lora.peft_fields import FIELDS
from tests.parity import reference, tiny

pytestmark = [
    pytest.mark.torch,
    # PEFT reads an old name of transformers, and says that it saves embeddings.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
]
pytest.importorskip("peft", reason="make env-parity installs peft")

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LINEAR = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
SETTINGS: dict[str, dict[str, Any]] = {
    "all": {"r": 4, "lora_alpha": 8, "target_modules": LINEAR},
    "some": {"r": 6, "lora_alpha": 3, "target_modules": ["q_proj", "down_proj"]},
    "rslora": {"r": 8, "lora_alpha": 4, "target_modules": ATTENTION, "use_rslora": True},
    "patterns": {
        "r": 2,
        "lora_alpha": 4,
        "target_modules": LINEAR,
        "rank_pattern": {"q_proj": 5, "layers.1.mlp.up_proj": 3},
        "alpha_pattern": {"layers.0.self_attn.v_proj": 16},
    },
}
TOLERANCE = 1e-4


def write_by_peft(folder: Path, model: Path, seed: int, setting: dict[str, Any]) -> Any:
    """Save an adapter with random matrices; return PEFT's model of it."""
    import peft
    import torch

    torch.manual_seed(seed)
    config = peft.LoraConfig(**setting)
    adapted = peft.get_peft_model(reference.load_reference(model, "float32"), config).eval()
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.normal_(std=0.5 * weight.shape[1] ** -0.5)
    adapted.save_pretrained(folder)
    return adapted


def test_each_field_of_this_peft_is_read_neutral_or_refused() -> None:
    import peft

    assert {field.name for field in dataclasses.fields(peft.LoraConfig)} <= FIELDS


@pytest.mark.parametrize("variant", ["llama-mha", "qwen3-tied", "gemma3-mixed"])
def test_batches_of_adapters_have_the_logits_of_peft(variant: str, tmp_path: Path) -> None:
    model = tiny.write_checkpoint(tmp_path / "model", variant)
    adapters = {
        name: write_by_peft(tmp_path / name, model, seed, setting)
        for seed, (name, setting) in enumerate(SETTINGS.items())
    }
    names = [*SETTINGS, None] * 2
    assert_peft(model, adapters, names, {name: str(tmp_path / name) for name in SETTINGS})


def test_embeddings_and_heads_have_the_logits_of_peft(tmp_path: Path) -> None:
    model = tiny.write_checkpoint(tmp_path / "model", "llama-mha")
    targets = ["embed_tokens", "lm_head", "v_proj"]
    setting = {"r": 4, "lora_alpha": 8, "target_modules": targets}
    adapters = {
        name: write_by_peft(tmp_path / name, model, seed, setting) for seed, name in enumerate("ab")
    }
    folders = {name: str(tmp_path / name) for name in adapters}
    names = ["a", "b", None, "a", "b"] * 2
    assert_peft(model, adapters, names, folders, lora_targets=targets)


def assert_peft(
    model: Path, adapters: Any, names: Any, folders: dict[str, str], **fields: Any
) -> None:
    """A batch over the adapters has PEFT's log-probabilities, of prompts and new tokens."""
    prompts = [prompt[:100] for prompt in (*tiny.prompts()[1:6], *tiny.prompts()[1:6][::-1])]
    params = SamplingParams(
        max_tokens=6, temperature=0.0, ignore_eos=True, prompt_logprobs=0, logprobs=0
    )
    fields |= {"max_num_seqs": 10, "max_model_len": 128, "max_num_batched_tokens": 64}
    with LLM(str(model), dtype="float32", generation_config="none", lora=folders, **fields) as llm:
        outputs = llm.generate(prompts, params, lora=names)
    base = reference.load_reference(model, "float32")
    for prompt, name, output in zip(prompts, names, outputs, strict=True):
        new = list(output.outputs[0].token_ids)
        theirs = reference.logits_of(base if name is None else adapters[name], [*prompt, *new])
        told = [*(output.prompt_logprobs or ()), *(output.outputs[0].logprobs or ())]
        logprobs = theirs - np.logaddexp.reduce(theirs, axis=1, keepdims=True)
        for at, token in enumerate([*prompt, *new][1:]):
            one = told[at + 1]
            assert one is not None
            assert one[token] == pytest.approx(float(logprobs[at, token]), abs=TOLERANCE), name
        assert theirs[len(prompt) - 1 : -1].argmax(axis=1).tolist() == new
