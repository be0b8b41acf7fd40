"""The Qwen3 family (dense): queries and keys are normed per head; head_dim has its own field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.contracts.model import Model, ModelFamily
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.fields import flag
from enginebay_models.hf_config import layer_windows, read_decoder

_DEFAULT_HEAD_DIM = 128
_DEFAULT_KV_HEADS = 32


class Qwen3Family(ModelFamily):
    """Windows as in `qwen2`, and norms of queries and keys. Biases: `attention_bias`."""

    name = "qwen3"
    architectures = ("Qwen3ForCausalLM",)

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        decoder = read_decoder(
            config,
            head_dim=_DEFAULT_HEAD_DIM,
            kv_heads=_DEFAULT_KV_HEADS,
            max_model_len=max_model_len,
        )
        bias = flag(config, "attention_bias", default=False)
        windows = layer_windows(config, decoder.num_layers)
        variant = Variant(windows=windows, qkv_bias=bias, out_bias=bias, qk_norm=True)
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


family = Qwen3Family()
