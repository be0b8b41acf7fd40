"""The StarCoder2 family: LayerNorms with biases, and a plain MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.contracts.model import Model, ModelFamily
from enginebay_models.blocks import plain_mlp
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.fields import flag
from enginebay_models.hf_config import every_window, read_decoder

_DEFAULTS: dict[str, Any] = {
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


class Starcoder2Family(ModelFamily):
    """Full attention, or a window of `sliding_window` tokens; LayerNorm, a plain MLP. Biases:
    `use_bias`.
    """

    name = "starcoder2"
    architectures = ("Starcoder2ForCausalLM",)

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        decoder = read_decoder(
            _DEFAULTS | dict(config),
            kv_heads=2,
            max_model_len=max_model_len,
            eps=("norm_epsilon", 1e-5),
        )
        bias = flag(config, "use_bias", default=True)
        variant = Variant(
            windows=every_window(config, decoder.num_layers),
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=bias,
            layer_norms=True,
            norm_bias=True,
            mlp=plain_mlp,
            names={"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"},
        )
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


family = Starcoder2Family()
