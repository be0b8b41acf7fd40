"""The Arcee family (AFM): Llama with a plain MLP of squared ReLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.contracts.model import Model, ModelFamily
from enginebay_models.blocks import plain_mlp
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.fields import bad_field, flag
from enginebay_models.hf_config import read_decoder

_DEFAULTS: dict[str, Any] = {"hidden_act": "relu2", "max_position_embeddings": 4096}


class ArceeFamily(ModelFamily):
    """Full attention; an MLP without a gate. Biases: `attention_bias`, `mlp_bias`."""

    name = "arcee"
    architectures = ("ArceeForCausalLM",)

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        decoder = read_decoder(
            _DEFAULTS | dict(config), max_model_len=max_model_len, eps=("rms_norm_eps", 1e-5)
        )
        if decoder.hidden_size % decoder.num_q_heads:
            allowed = f"a multiple of num_attention_heads = {decoder.num_q_heads}"
            raise bad_field("hidden_size", decoder.hidden_size, allowed)
        bias = flag(config, "attention_bias", default=False)
        variant = Variant(
            windows=(None,) * decoder.num_layers,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=flag(config, "mlp_bias", default=False),
            mlp=plain_mlp,
        )
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


family = ArceeFamily()
