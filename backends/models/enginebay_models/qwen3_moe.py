"""The Qwen3-MoE family: Qwen3 with a mixture of experts in place of MLPs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.contracts.model import Model, ModelFamily
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.experts import experts_or_mlp, read_experts
from enginebay_models.fields import flag, positive
from enginebay_models.hf_config import DEFAULT_WINDOW, read_decoder

_DEFAULT_KV_HEADS = 4


def _window(config: Mapping[str, Any]) -> int | None:
    """Return the sliding window of all layers, or None."""
    if flag(config, "use_sliding_window", default=False):
        if config.get("sliding_window", DEFAULT_WINDOW) is not None:
            return positive(config, "sliding_window", DEFAULT_WINDOW)
    return None


class Qwen3MoeFamily(ModelFamily):
    """Full attention, or with `use_sliding_window` a window in every layer; norms of queries and
    keys; MLPs of experts.

    The default of `head_dim` is hidden_size / num_attention_heads. Biases: `attention_bias`.
    """

    name = "qwen3_moe"
    architectures = ("Qwen3MoeForCausalLM",)

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        decoder = read_decoder(config, kv_heads=_DEFAULT_KV_HEADS, max_model_len=max_model_len)
        experts = read_experts(config, decoder.num_layers, count=128, chosen=8, width=768)
        bias = flag(config, "attention_bias", default=False)
        windows = (_window(config),) * decoder.num_layers

        variant = Variant(
            windows=windows,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=True,
            mlp=experts_or_mlp(decoder, experts),
            mlp_config=experts,
        )
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


family = Qwen3MoeFamily()
