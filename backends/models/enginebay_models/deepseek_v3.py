"""The DeepSeek-V3 family (V3, R1): DeepSeek-V2's attention; experts are chosen by sigmoids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.contracts.model import Model, ModelFamily
from enginebay_models.deepseek_v2 import build_latent
from enginebay_models.experts import read_sigmoid_experts
from enginebay_models.fields import flag, positive, refuse_others
from enginebay_models.hf_config import MAX_LAYERS, later_layers

_DEFAULTS: dict[str, Any] = {"max_position_embeddings": 4096}


class DeepseekV3Family(ModelFamily):
    """Latent attention (MLA), and MLPs of routed and shared experts.

    Experts are chosen by the sigmoids of their scores plus a learned correction: the best experts
    of the best groups, which are those whose two best experts are best. Biases: `attention_bias`.
    `num_key_value_heads` is not read: all heads have keys of their own, of the same vectors.
    """

    name = "deepseek_v3"
    architectures = ("DeepseekV3ForCausalLM",)

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        refuse_others(config, {"mlp_bias": False})
        num_layers = positive(config, "num_hidden_layers", most=MAX_LAYERS)
        experts = read_sigmoid_experts(
            config, num_layers, count=256, width=2048, groups=(8, 4), first=3, scale=2.5
        )
        return build_latent(
            self.name,
            _DEFAULTS | dict(config),
            experts,
            dtype=dtype,
            num_shards=num_shards,
            max_len=max_model_len,
            num_shared=1,
            is_interleaved=flag(config, "rope_interleave", default=True),
            unused=later_layers(config, num_layers),
        )


family = DeepseekV3Family()
