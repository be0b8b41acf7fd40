"""The Falcon family: fused queries, keys and values, parallel attention and MLP, LayerNorms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.contracts.model import Model, ModelFamily
from enginebay_models.blocks import Residual, plain_mlp
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.fields import bad_field, flag, positive, refuse_others, with_own_names
from enginebay_models.hf_config import activation, read_decoder, with_equal_heads
from enginebay_models.tensors import QkvRows

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 65024,
    "n_embed": 4544,
    "num_hidden_layers": 32,
    "num_attention_heads": 71,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
_NAMES = {
    "model.embed_tokens.": "transformer.word_embeddings.",
    "model.layers.": "transformer.h.",
    "model.norm.": "transformer.ln_f.",
    "self_attn.qkv_proj.": "self_attention.query_key_value.",
    "self_attn.o_proj.": "self_attention.dense.",
    "mlp.up_proj.": "mlp.dense_h_to_4h.",
    "mlp.down_proj.": "mlp.dense_4h_to_h.",
}
"""(name of a tensor in other families, name in this checkpoint) pairs."""
_TWO_NORMS = {"input_layernorm.": "ln_attn.", "post_attention_layernorm.": "ln_mlp."}


class FalconFamily(ModelFamily):
    """Full attention with rotary positions, LayerNorm, a plain MLP. Biases: `bias`.

    `new_decoder_architecture` has `num_kv_heads`, and attention and MLP are parallel, with a norm
    each, or with one if `num_ln_in_parallel_attn` is 1. Without it, there is one KV head, or
    `multi_query` is false and each head has its own, and `parallel_attn` says whether attention and
    MLP are parallel. `alibi` is refused: transformers rounds its slopes to bfloat16.
    """

    name = "falcon"
    architectures = ("FalconForCausalLM",)

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        refuse_others(config, {"alibi": False})
        config = _DEFAULTS | with_own_names(config, {"n_embed": "hidden_size"})
        shared = {"num_key_value_heads": _kv_heads(config), "hidden_size": config["n_embed"]}
        shared |= {"hidden_act": activation(config, "activation", "gelu")}
        shared["intermediate_size"] = 4 * positive(config, "n_embed")
        if config.get("ffn_hidden_size") is not None:
            shared["intermediate_size"] = positive(config, "ffn_hidden_size")
        decoder = read_decoder(
            with_equal_heads(config | shared),
            max_model_len=max_model_len,
            eps=("layer_norm_epsilon", 1e-5),
        )
        parallel, num_norms = _parallel_norms(config)
        bias = flag(config, "bias", default=False)
        variant = Variant(
            windows=(None,) * decoder.num_layers,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=bias,
            qkv_rows=QkvRows("grouped"),
            mlp_norm=num_norms == 2,
            layer_norms=True,
            norm_bias=True,
            residual=Residual(parallel=parallel),
            mlp=plain_mlp,
            names=_NAMES | (_TWO_NORMS if parallel else {}) if num_norms == 2 else _NAMES,
        )
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


def _is_new(config: Mapping[str, Any]) -> bool:
    return flag(config, "new_decoder_architecture", default=False)


def _kv_heads(config: Mapping[str, Any]) -> int:
    """Return the number of KV heads; CheckpointError names a wrong field."""
    heads = positive(config, "num_attention_heads")
    given = heads if config.get("num_kv_heads") is None else positive(config, "num_kv_heads")
    if _is_new(config):
        if heads % given:
            allowed = f"a divisor of num_attention_heads = {heads}"
            raise bad_field("num_kv_heads", given, allowed)
        return given
    if flag(config, "multi_query", default=True):
        return 1
    if given != heads:
        allowed = f"num_attention_heads = {heads}, without multi_query"
        raise bad_field("num_kv_heads", given, allowed)
    return heads


def _parallel_norms(config: Mapping[str, Any]) -> tuple[bool, int]:
    """Return whether attention and MLP are parallel, and how many norms a layer has."""
    parallel, new = flag(config, "parallel_attn", default=True), _is_new(config)
    name = "num_ln_in_parallel_attn"
    if not new:
        if parallel and config.get(name) == 2:
            raise bad_field(name, 2, "1 or absent, without new_decoder_architecture")
        return parallel, 1 if parallel else 2
    if not parallel:
        raise bad_field("parallel_attn", parallel, "true, with new_decoder_architecture")
    return True, 2 if config.get(name) is None else positive(config, name, most=2)


family = FalconFamily()
