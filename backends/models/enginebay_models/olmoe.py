"""The OLMoE family: norms over all queries and all keys, and MLPs of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.contracts.model import Model, ModelFamily
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.experts import ExpertsConfig, experts_or_mlp, read_counts
from enginebay_models.fields import bad_field, flag
from enginebay_models.hf_config import read_decoder

_DEFAULTS: dict[str, Any] = {"max_position_embeddings": 4096}


class OlmoeFamily(ModelFamily):
    """Full attention; one norm each over all queries and all keys; MLPs of experts, each as wide as
    `intermediate_size`. Biases: `attention_bias`. `clip_qkv` is refused.
    """

    name = "olmoe"
    architectures = ("OlmoeForCausalLM",)

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        if config.get("clip_qkv") is not None:
            raise bad_field("clip_qkv", config["clip_qkv"], "null, or absent")
        decoder = read_decoder(
            _DEFAULTS | dict(config), max_model_len=max_model_len, eps=("rms_norm_eps", 1e-5)
        )
        experts = ExpertsConfig(
            *read_counts(config, count=64, chosen=8),
            decoder.intermediate_size,
            is_normed=flag(config, "norm_topk_prob", default=False),
            plain_layers=frozenset(),
        )
        bias = flag(config, "attention_bias", default=False)
        variant = Variant(
            windows=(None,) * decoder.num_layers,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=True,
            qk_norm_joint=True,
            mlp=experts_or_mlp(decoder, experts),
            mlp_config=experts,
        )
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


family = OlmoeFamily()
