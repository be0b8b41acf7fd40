"""The Mistral family: Llama's decoder, with an optional sliding window in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.contracts.model import Model, ModelFamily
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.fields import positive
from enginebay_models.hf_config import (
    DEFAULT_WINDOW,
    FULL,
    SLIDING,
    check_layer_types,
    read_decoder,
)

_DEFAULT_KV_HEADS = 8


class MistralFamily(ModelFamily):
    """A window of `sliding_window` tokens (4096 if absent) in every layer; full attention if it is
    null. Of `Mistral3ForConditionalGeneration` the language model is served, by `ministral3` if
    `text_config` has that `model_type`.
    """

    name = "mistral"
    architectures = ("MistralForCausalLM", "Mistral3ForConditionalGeneration")

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        positive(
            config, "num_key_value_heads", _DEFAULT_KV_HEADS
        )  # null has no meaning in this family, so it is refused
        decoder = read_decoder(config, kv_heads=_DEFAULT_KV_HEADS, max_model_len=max_model_len)
        off = config.get("sliding_window", DEFAULT_WINDOW) is None
        window = None if off else positive(config, "sliding_window", DEFAULT_WINDOW)
        check_layer_types(config, decoder.num_layers, (FULL if off else SLIDING,))
        variant = Variant(windows=(window,) * decoder.num_layers)
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


family = MistralFamily()
