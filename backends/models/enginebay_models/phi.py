"""The Phi family (Phi-1, Phi-1.5, Phi-2): attention and MLP read one norm; biases everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.contracts.model import Model, ModelFamily
from enginebay_models.blocks import LogitRule, Residual, plain_mlp
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.fields import refuse_others
from enginebay_models.hf_config import read_decoder

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 51200,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "hidden_act": "gelu_new",
    "max_position_embeddings": 2048,
    "partial_rotary_factor": 0.5,
}
_NAMES = {
    "model.norm.": "model.final_layernorm.",
    "self_attn.o_proj.": "self_attn.dense.",
    "mlp.up_proj.": "mlp.fc1.",
    "mlp.down_proj.": "mlp.fc2.",
}
"""(name of a tensor in other families, name in this checkpoint) pairs."""


class PhiFamily(ModelFamily):
    """Full attention, rotary positions in `partial_rotary_factor` of each head, LayerNorm; a plain
    MLP, parallel to attention; biases everywhere, of the head too. `qk_layernorm` is refused.
    """

    name = "phi"
    architectures = ("PhiForCausalLM",)

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        refuse_others(config, {"qk_layernorm": False})
        decoder = read_decoder(
            _DEFAULTS | dict(config),
            max_model_len=max_model_len,
            eps=("layer_norm_eps", 1e-5),
            partial=True,
        )
        variant = Variant(
            windows=(None,) * decoder.num_layers,
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            mlp_norm=False,
            layer_norms=True,
            norm_bias=True,
            residual=Residual(parallel=True),
            logits=LogitRule(bias=True),
            mlp=plain_mlp,
            names=_NAMES,
        )
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


family = PhiFamily()
