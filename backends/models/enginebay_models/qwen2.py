"""The Qwen2 family (Qwen2 and Qwen2.5): biases of queries, keys and values; upper layers may have
windows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.contracts.model import Model, ModelFamily
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.fields import positive
from enginebay_models.hf_config import layer_windows, read_decoder

_DEFAULT_KV_HEADS = 32


class Qwen2Family(ModelFamily):
    """Full attention; with `use_sliding_window`, a window in the layers from `max_window_layers`
    on, or as `layer_types` says.

    Queries, keys and values have biases.
    """

    name = "qwen2"
    architectures = ("Qwen2ForCausalLM",)

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        if "head_dim" in config:
            positive(config, "head_dim")  # null has no meaning in this family, so it is refused
        decoder = read_decoder(config, kv_heads=_DEFAULT_KV_HEADS, max_model_len=max_model_len)
        variant = Variant(windows=layer_windows(config, decoder.num_layers), qkv_bias=True)
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


family = Qwen2Family()
