"""The Ministral family: Mistral's decoder, with a sliding window in some layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.contracts.model import Model, ModelFamily
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.fields import positive
from enginebay_models.hf_config import DEFAULT_WINDOW, every_window, mixed_windows, read_decoder

_DEFAULTS: dict[str, Any] = {"max_position_embeddings": 131072}


class MinistralFamily(ModelFamily):
    """A window of `sliding_window` tokens (4096 if absent) in every layer, or as `layer_types`
    says; full attention if it is null.
    """

    name = "ministral"
    architectures = ("MinistralForCausalLM",)

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        decoder = read_decoder(_DEFAULTS | dict(config), kv_heads=8, max_model_len=max_model_len)
        num_layers = decoder.num_layers
        if config.get("sliding_window", DEFAULT_WINDOW) is None:
            windows = every_window(config, num_layers)
        else:
            window = positive(config, "sliding_window", DEFAULT_WINDOW)
            windows = mixed_windows(config, num_layers, window, every=num_layers + 1)
        variant = Variant(windows=windows)
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


family = MinistralFamily()
