"""What transformers on torch makes of a generated configuration: derived values and logits."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from enginebay_testing.model_harness import random_tensor
from tests.parity.config_zoo import FAMILIES, POINTS, Derived, Generated, build, turns_a_part


def transformers_model(one: Generated) -> Any:
    """The torch model of a configuration, in f32; whatever transformers raises when it refuses."""
    import torch
    import transformers

    config_class = getattr(transformers, FAMILIES[one.family].replace("ForCausalLM", "Config"))
    config = config_class.from_dict(copy.deepcopy(dict(one.config)))
    config._attn_implementation = "eager"
    with torch.no_grad():
        return getattr(transformers, FAMILIES[one.family])(config).eval()


def derived(one: Generated) -> Derived | str:
    """What transformers derives in one uncached forward of max_model_len tokens, or the
    exception.
    """
    import torch
    from transformers.activations import ACT2FN

    try:
        model = transformers_model(one)
        config, rotary = model.config, model.model.rotary_emb
        with torch.no_grad():
            rotary(torch.zeros(1), torch.arange(one.max_model_len)[None])
            if not turns_a_part(one):
                logits = model(torch.zeros(1, one.max_model_len, dtype=torch.long)).logits
                assert bool(torch.isfinite(logits).all()), "logits that are not finite"
            activation = ACT2FN[config.hidden_act](torch.from_numpy(POINTS)).numpy()
    except Exception as error:  # noqa: BLE001 - any of them is a refusal
        return f"{type(error).__name__}: {error}"
    attention = model.model.layers[0].self_attn
    kinds = getattr(config, "layer_types", None) if one.family.startswith("qwen") else None
    window = getattr(config, "sliding_window", None) if one.family != "llama" else None
    kinds = (
        kinds or ["sliding_attention" if window else "full_attention"] * config.num_hidden_layers
    )
    return Derived(
        rotary.inv_freq.numpy(),
        float(rotary.attention_scaling),
        attention.head_dim,
        config.num_key_value_heads,
        tuple(window if kind == "sliding_attention" else None for kind in kinds),
        activation,
        config.tie_word_embeddings,
    )


def logits(one: Generated, token_ids: list[int]) -> np.ndarray:
    """Logits f32 [tokens, vocab] of the model whose tensors are random_tensor(name, shape, 0)."""
    import torch

    model, config, _ = build(one)
    reference = transformers_model(one)
    tensors = {
        name: torch.from_numpy(random_tensor(name, shape, 0))
        for source in model.tensor_sources().values()
        for name, shape in zip(source.names, source.shapes, strict=True)
    }
    missing, unexpected = reference.load_state_dict(tensors, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"] if config.tied else [], [])
    with torch.no_grad():
        result: np.ndarray = reference(torch.tensor([token_ids])).logits[0].numpy()
    return result
