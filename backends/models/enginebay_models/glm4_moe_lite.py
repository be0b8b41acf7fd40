"""The GLM-4 MoE Lite family (GLM-4.7-Flash): DeepSeek-V3's attention and routing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from enginebay.contracts.model import Model, ModelFamily
from enginebay_models.deepseek_v2 import build_latent
from enginebay_models.experts import read_sigmoid_experts
from enginebay_models.fields import bad_field, flag, positive, refuse_others
from enginebay_models.hf_config import MAX_LAYERS, later_layers

_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 202752,
    "num_experts_per_tok": 4,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "rms_norm_eps": 1e-5,
    "v_head_dim": 256,
}
_DENSE, _SPARSE = "dense", "sparse"


class Glm4MoeLiteFamily(ModelFamily):
    """Latent attention (MLA), and MLPs of routed and shared experts, chosen as in `deepseek_v3`.

    `mlp_layer_types` names the layers with a plain MLP, which is the first alone if the field is
    absent. Biases: `attention_bias`. `num_key_value_heads` is not read.
    """

    name = "glm4_moe_lite"
    architectures = ("Glm4MoeLiteForCausalLM",)

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        config = _DEFAULTS | dict(config)
        refuse_others(config, {"mlp_bias": False})
        num_layers = positive(config, "num_hidden_layers", most=MAX_LAYERS)
        experts = read_sigmoid_experts(
            config, num_layers, count=64, width=1536, groups=(1, 1), first=1, scale=1.8
        )
        experts = dataclasses.replace(experts, plain_layers=_plain_layers(config, num_layers))
        return build_latent(
            self.name,
            config,
            experts,
            dtype=dtype,
            num_shards=num_shards,
            max_len=max_model_len,
            num_shared=1,
            is_interleaved=flag(config, "rope_interleave", default=True),
            unused=later_layers(config, num_layers),
        )


def _plain_layers(config: Mapping[str, Any], num_layers: int) -> frozenset[int]:
    """Read the layers without experts; `first_k_dense_replace` has to agree with them."""
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        kinds = [_DENSE] + [_SPARSE] * (num_layers - 1)
    is_list = isinstance(kinds, list) and len(kinds) == num_layers
    if not is_list or any(kind not in (_DENSE, _SPARSE) for kind in kinds):
        allowed = f"a list of {_DENSE} or {_SPARSE} for each of {num_layers} layers"
        raise bad_field("mlp_layer_types", kinds, allowed)
    plain = frozenset(layer for layer, kind in enumerate(kinds) if kind == _DENSE)
    first = config.get("first_k_dense_replace")
    if first is not None and plain != frozenset(range(min(first, num_layers))):
        allowed = f"the number of the first layers that are {_DENSE}: {len(plain)}"
        raise bad_field("first_k_dense_replace", first, allowed)
    return plain


family = Glm4MoeLiteFamily()
