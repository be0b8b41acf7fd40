"""The GPT-BigCode family (StarCoder, SantaCoder): GPT-2 with one key and value for all heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.contracts.model import Model, ModelFamily
from enginebay_models.blocks import InputRule, plain_mlp
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.fields import flag, number, positive, refuse_others, with_own_names
from enginebay_models.hf_config import activation, read_decoder, with_equal_heads
from enginebay_models.tensors import QkvRows

_USUAL = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
}
"""Fields of config.json, and the names in other families, which they may have too."""
_NAMES = {
    "model.embed_tokens.": "transformer.wte.",
    "model.embed_positions.": "transformer.wpe.",
    "model.layers.": "transformer.h.",
    "model.norm.": "transformer.ln_f.",
    "input_layernorm.": "ln_1.",
    "post_attention_layernorm.": "ln_2.",
    "self_attn.qkv_proj.": "attn.c_attn.",
    "self_attn.o_proj.": "attn.c_proj.",
    "mlp.up_proj.": "mlp.c_fc.",
    "mlp.down_proj.": "mlp.c_proj.",
}
"""(name of a tensor in other families, name in this checkpoint) pairs."""


class GptBigCodeFamily(ModelFamily):
    """Full attention with one KV head, or without groups if `multi_query` is false; learned
    positions, LayerNorm, a plain MLP, and biases everywhere.

    `add_cross_attention` is refused.
    """

    name = "gpt_bigcode"
    architectures = ("GPTBigCodeForCausalLM",)

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        refuse_others(config, {"add_cross_attention": False})
        config = with_own_names(config, _USUAL)
        hidden, heads = positive(config, "n_embd", 768), positive(config, "n_head", 12)
        inner = 4 * hidden if config.get("n_inner") is None else positive(config, "n_inner")
        shared = with_equal_heads(
            {
                "vocab_size": positive(config, "vocab_size", 50257),
                "hidden_size": hidden,
                "intermediate_size": inner,
                "num_hidden_layers": config.get("n_layer", 12),
                "num_attention_heads": heads,
                "num_key_value_heads": 1 if flag(config, "multi_query", default=True) else heads,
                "max_position_embeddings": positive(config, "n_positions", 1024),
                "layer_norm_epsilon": number(config, "layer_norm_epsilon", 1e-5),
                "hidden_act": activation(config, "activation_function", "gelu_pytorch_tanh"),
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
            unrotated_layers=frozenset(range(decoder.num_layers)),
            softmax_scale=None if flag(config, "scale_attn_weights", default=True) else 1.0,
            layer_norms=True,
            norm_bias=True,
            inputs=InputRule(num_positions=decoder.max_model_len),
            mlp=plain_mlp,
            names=_NAMES,
        )
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


family = GptBigCodeFamily()
