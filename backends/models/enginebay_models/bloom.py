"""The BLOOM family: ALiBi instead of rotary positions, a norm of embeddings, and plain MLPs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.contracts.model import Model, ModelFamily
from enginebay_models.blocks import InputRule, plain_mlp
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.fields import bad_field, flag, number, positive, with_own_names
from enginebay_models.hf_config import read_decoder, with_equal_heads
from enginebay_models.tensors import QkvRows

_USUAL = {
    "n_embed": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
}
"""Fields of config.json, and the names in other families, which they may have too."""
_NAMES = {
    "model.embed_tokens.": "transformer.word_embeddings.",
    "model.embed_norm.": "transformer.word_embeddings_layernorm.",
    "model.layers.": "transformer.h.",
    "model.norm.": "transformer.ln_f.",
    "self_attn.qkv_proj.": "self_attention.query_key_value.",
    "self_attn.o_proj.": "self_attention.dense.",
    "mlp.up_proj.": "mlp.dense_h_to_4h.",
    "mlp.down_proj.": "mlp.dense_4h_to_h.",
}
"""(name of a tensor in other families, name in this checkpoint) pairs."""


class BloomFamily(ModelFamily):
    """Full attention without groups, with slopes by distance (ALiBi) and no rotary positions;
    LayerNorm, of embeddings too; a plain MLP; biases everywhere.

    The longest text has `seq_length` tokens, 2048 if that is absent.
    `apply_residual_connection_post_layernorm` is refused, and `slow_but_exact` if `pretraining_tp`
    is more than 1.
    """

    name = "bloom"
    architectures = ("BloomForCausalLM",)

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        config = with_own_names(config, _USUAL)
        for name in ("apply_residual_connection_post_layernorm", "slow_but_exact"):
            if flag(config, name, default=False):
                raise bad_field(name, value=True, allowed="false or absent")
        hidden = positive(config, "n_embed", 64)
        eps = number(config, "layer_norm_epsilon", 1e-5)
        shared = with_equal_heads(
            {
                "vocab_size": positive(config, "vocab_size", 250880),
                "hidden_size": hidden,
                "intermediate_size": 4 * hidden,
                "num_hidden_layers": config.get("n_layer", 2),
                "num_attention_heads": config.get("n_head", 8),
                "max_position_embeddings": positive(config, "seq_length", 2048),
                "layer_norm_epsilon": eps,
                "hidden_act": "gelu_new",
                "tie_word_embeddings": flag(config, "tie_word_embeddings", default=True),
            }
        )
        decoder = read_decoder(
            shared, max_model_len=max_model_len, eps=("layer_norm_epsilon", 1e-5)
        )
        variant = Variant(
            windows=(None,) * decoder.num_layers,
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            qkv_rows=QkvRows("grouped"),
            alibi=True,
            layer_norms=True,
            norm_bias=True,
            inputs=InputRule(norm_eps=eps),
            mlp=plain_mlp,
            names=_NAMES,
        )
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


family = BloomFamily()
