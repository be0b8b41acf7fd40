"""The GPT-J family: attention and MLP read the same norm; rotary pairs lie beside each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from enginebay.contracts.model import Model, ModelFamily
from enginebay.ops.rotary import RopeSpec
from enginebay_models.blocks import LogitRule, Residual, plain_mlp
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.fields import bad_field, flag, number, positive, with_own_names
from enginebay_models.hf_config import activation, read_decoder, with_equal_heads
from enginebay_models.tensors import QkvRows

USUAL = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
}
"""Fields of config.json, and the names in other families, which they may have too."""
_NAMES = {
    "model.embed_tokens.": "transformer.wte.",
    "model.layers.": "transformer.h.",
    "model.norm.": "transformer.ln_f.",
    "input_layernorm.": "ln_1.",
    "self_attn.o_proj.": "attn.out_proj.",
    "self_attn.": "attn.",
    "mlp.up_proj.": "mlp.fc_in.",
    "mlp.down_proj.": "mlp.fc_out.",
}
"""(name of a tensor in other families, name in this checkpoint) pairs."""
_THETA = 10000.0


class GptJFamily(ModelFamily):
    """Full attention without groups or biases, rotary positions in `rotary_dim` features of each
    head, LayerNorm; a plain MLP with biases, parallel to attention; a head with a bias.
    """

    name = "gptj"
    architectures = ("GPTJForCausalLM",)

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        return build_gptj(
            self.name,
            config,
            "apart",
            dtype=dtype,
            num_shards=num_shards,
            max_model_len=max_model_len,
        )


def build_gptj(
    family: str,
    config: Mapping[str, Any],
    place: Literal["apart", "blocks"],
    *,
    dtype: str,
    num_shards: int,
    max_model_len: int | None,
) -> Model:
    """Return the model of a family, as ModelFamily.build does; `place` is that of QkvRows."""
    config = with_own_names(config, USUAL)
    hidden = positive(config, "n_embd", 4096)
    inner = 4 * hidden if config.get("n_inner") is None else positive(config, "n_inner")
    shared = with_equal_heads(
        {
            "vocab_size": positive(config, "vocab_size", 50400),
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": config.get("n_layer", 28),
            "num_attention_heads": config.get("n_head", 16),
            "max_position_embeddings": positive(config, "n_positions", 2048),
            "layer_norm_epsilon": number(config, "layer_norm_epsilon", 1e-5),
            "hidden_act": activation(config, "activation_function", "gelu_new"),
            "tie_word_embeddings": flag(config, "tie_word_embeddings", default=False),
        }
    )
    decoder = read_decoder(shared, max_model_len=max_model_len, eps=("layer_norm_epsilon", 1e-5))
    rotary_dim = positive(config, "rotary_dim", 64)
    if rotary_dim % 2 or rotary_dim > decoder.head_dim:
        allowed = f"an even number of at most {decoder.head_dim}, the features of a head"
        raise bad_field("rotary_dim", rotary_dim, allowed)
    decoder = dataclasses.replace(decoder, rope=RopeSpec(_THETA, rotary_dim))
    variant = Variant(
        windows=(None,) * decoder.num_layers,
        mlp_bias=True,
        qkv_rows=QkvRows(place, rotary_dim),
        mlp_norm=False,
        layer_norms=True,
        norm_bias=True,
        residual=Residual(parallel=True),
        logits=LogitRule(bias=True),
        mlp=plain_mlp,
        names=_NAMES,
    )
    return build_decoder(family, decoder, variant, dtype=dtype, num_shards=num_shards)


family = GptJFamily()
