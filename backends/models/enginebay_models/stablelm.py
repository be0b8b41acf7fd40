"""The StableLM family: LayerNorms with biases, and rotary positions in a part of each head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.contracts.model import Model, ModelFamily
from enginebay_models.blocks import Residual
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.fields import flag, refuse_others
from enginebay_models.hf_config import FULL, check_layer_types, read_decoder, with_equal_heads

_DEFAULTS: dict[str, Any] = {"max_position_embeddings": 4096, "partial_rotary_factor": 0.25}


class StableLmFamily(ModelFamily):
    """Full attention, rotary positions in `partial_rotary_factor` of each head, LayerNorm.

    With `use_parallel_residual` attention and MLP are parallel; `qk_layernorm` is refused. Biases:
    `use_qkv_bias`.
    """

    name = "stablelm"
    architectures = ("StableLmForCausalLM",)

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        refuse_others(config, {"qk_layernorm": False})
        shared = with_equal_heads(_DEFAULTS | dict(config))
        decoder = read_decoder(
            shared,
            kv_heads=32,
            max_model_len=max_model_len,
            eps=("layer_norm_eps", 1e-5),
            partial=True,
        )
        check_layer_types(config, decoder.num_layers, (FULL,))
        parallel = flag(config, "use_parallel_residual", default=False)
        variant = Variant(
            windows=(None,) * decoder.num_layers,
            qkv_bias=flag(config, "use_qkv_bias", default=False),
            mlp_norm=not parallel,
            layer_norms=True,
            norm_bias=True,
            residual=Residual(parallel=parallel),
        )
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


family = StableLmFamily()
