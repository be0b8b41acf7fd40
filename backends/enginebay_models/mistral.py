"""The Mistral family: Llama's decoder with a sliding window in every layer, where config.json gives one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.model import Model, ModelFamily
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.hf_config import positive, read_decoder

# transformers' default where config.json is silent; null turns the window off.
_DEFAULT_WINDOW = 4096
_DEFAULT_KV_HEADS = 8


class MistralFamily(ModelFamily):
    """Each layer attends to the last `sliding_window` positions, or to all of them when that is null."""

    name = "mistral"
    architectures = ("MistralForCausalLM",)

    def build(self, config: Mapping[str, Any], *, dtype: str, num_shards: int = 1) -> Model:
        decoder = read_decoder({"num_key_value_heads": _DEFAULT_KV_HEADS, **config})
        given = {"sliding_window": _DEFAULT_WINDOW, **config}
        window = None if given["sliding_window"] is None else positive(given, "sliding_window")
        variant = Variant(windows=(window,) * decoder.num_layers)
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


family = MistralFamily()
