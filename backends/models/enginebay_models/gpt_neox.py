"""The GPT-NeoX family (Pythia, Dolly): attention and MLP read the same input through two norms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.contracts.model import Model, ModelFamily
from enginebay_models.blocks import Residual, plain_mlp
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.fields import flag, with_own_names
from enginebay_models.hf_config import FULL, check_layer_types, read_decoder, with_equal_heads
from enginebay_models.tensors import QkvRows

_DEFAULTS: dict[str, Any] = {
    "hidden_act": "gelu",
    "max_position_embeddings": 2048,
    "rotary_pct": 0.25,
    "rotary_emb_base": 10000.0,
}
_USUAL = {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"}
"""Fields of config.json, and the names in other families, which they may have too."""
_NAMES = {
    "model.embed_tokens.": "gpt_neox.embed_in.",
    "model.layers.": "gpt_neox.layers.",
    "model.norm.": "gpt_neox.final_layer_norm.",
    "lm_head.": "embed_out.",
    "self_attn.qkv_proj.": "attention.query_key_value.",
    "self_attn.o_proj.": "attention.dense.",
    "mlp.up_proj.": "mlp.dense_h_to_4h.",
    "mlp.down_proj.": "mlp.dense_4h_to_h.",
}
"""(name of a tensor in other families, name in this checkpoint) pairs."""


class GptNeoXFamily(ModelFamily):
    """Full attention without groups, rotary positions in `rotary_pct` of each head, LayerNorm, a
    plain MLP with biases.

    With `use_parallel_residual` attention and MLP are parallel. Biases: `attention_bias`.
    """

    name = "gpt_neox"
    architectures = ("GPTNeoXForCausalLM",)

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        shared = _DEFAULTS | with_own_names(config, _USUAL)
        shared["partial_rotary_factor"] = shared["rotary_pct"]
        shared["rope_theta"] = shared["rotary_emb_base"]
        shared = with_equal_heads(shared) | {"num_key_value_heads": None}
        decoder = read_decoder(
            shared, max_model_len=max_model_len, eps=("layer_norm_eps", 1e-5), partial=True
        )
        check_layer_types(config, decoder.num_layers, (FULL,))
        bias = flag(config, "attention_bias", default=True)
        variant = Variant(
            windows=(None,) * decoder.num_layers,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=True,
            qkv_rows=QkvRows("grouped"),
            layer_norms=True,
            norm_bias=True,
            residual=Residual(parallel=flag(config, "use_parallel_residual", default=True)),
            mlp=plain_mlp,
            names=_NAMES,
        )
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


family = GptNeoXFamily()
