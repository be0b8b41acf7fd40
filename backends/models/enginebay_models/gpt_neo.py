"""The GPT-Neo family: GPT-2 with a window in every other layer, and scores that are not scaled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.contracts.model import Model, ModelFamily
from enginebay_models.blocks import InputRule, plain_mlp
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.fields import bad_field, flag, number, positive, with_own_names
from enginebay_models.hf_config import MAX_LAYERS, activation, read_decoder, with_equal_heads

_USUAL = {"num_heads": "num_attention_heads", "num_layers": "num_hidden_layers"}
"""Fields of config.json, and the names in other families, which they may have too."""
_NAMES = {
    "model.embed_tokens.": "transformer.wte.",
    "model.embed_positions.": "transformer.wpe.",
    "model.layers.": "transformer.h.",
    "model.norm.": "transformer.ln_f.",
    "input_layernorm.": "ln_1.",
    "post_attention_layernorm.": "ln_2.",
    "self_attn.o_proj.": "self_attn.out_proj.",
    "self_attn.": "attn.attention.",
    "mlp.up_proj.": "mlp.c_fc.",
    "mlp.down_proj.": "mlp.c_proj.",
}
"""(name of a tensor in other families, name in this checkpoint) pairs."""
_GLOBAL, _LOCAL = "global", "local"
_DEFAULT_TYPES = [[[_GLOBAL, _LOCAL], 12]]


class GptNeoFamily(ModelFamily):
    """Full attention, or a window of `window_size` tokens, as `attention_types` says; without
    groups, and without a scale of scores. Learned positions, LayerNorm, a plain MLP.

    Queries, keys, values and the head have no biases.
    """

    name = "gpt_neo"
    architectures = ("GPTNeoForCausalLM",)

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        config = with_own_names(config, _USUAL)
        hidden, inner = positive(config, "hidden_size", 2048), "intermediate_size"
        shared = with_equal_heads(
            {
                "vocab_size": positive(config, "vocab_size", 50257),
                "hidden_size": hidden,
                inner: 4 * hidden if config.get(inner) is None else positive(config, inner),
                "num_hidden_layers": config.get("num_layers", 24),
                "num_attention_heads": config.get("num_heads", 16),
                "max_position_embeddings": positive(config, "max_position_embeddings", 2048),
                "layer_norm_epsilon": number(config, "layer_norm_epsilon", 1e-5),
                "hidden_act": activation(config, "activation_function", "gelu_new"),
                "tie_word_embeddings": flag(config, "tie_word_embeddings", default=True),
            }
        )
        decoder = read_decoder(
            shared, max_model_len=max_model_len, eps=("layer_norm_epsilon", 1e-5)
        )
        window = positive(config, "window_size", 256)
        kinds = _kinds(config, decoder.num_layers)
        variant = Variant(
            windows=tuple(window if kind == _LOCAL else None for kind in kinds),
            out_bias=True,
            mlp_bias=True,
            unrotated_layers=frozenset(range(decoder.num_layers)),
            softmax_scale=1.0,
            layer_norms=True,
            norm_bias=True,
            inputs=InputRule(num_positions=decoder.max_model_len),
            mlp=plain_mlp,
            names=_NAMES,
        )
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


def _kinds(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """Return _GLOBAL or _LOCAL for each layer: attention_layers, or attention_types, which is a
    list of [kinds, how often they are repeated]. A file that has both must have them agree.
    """
    given, listed = config.get("attention_types"), config.get("attention_layers")
    kinds = _repeated(_DEFAULT_TYPES if given is None else given)
    if listed is not None:
        if not _all_known(listed):
            raise bad_field("attention_layers", listed, f"a list of {_GLOBAL} or {_LOCAL}")
        if given is not None and listed != kinds:
            raise bad_field("attention_layers", listed, f"the layers of attention_types, {kinds}")
        kinds = listed
    if len(kinds) != num_layers:
        name = "num_layers" if "num_layers" in config else "num_layers by default"
        allowed = f"{len(kinds)}, the number of layers that attention_types names"
        raise bad_field(name, num_layers, allowed)
    return kinds


def _repeated(types: object) -> list[str]:
    kinds: list[str] = []
    for one in types if isinstance(types, list) else [types]:
        if (
            not isinstance(one, list)
            or len(one) != 2
            or not _all_known(one[0])
            or type(one[1]) is not int
            or not 0 < len(kinds) + len(one[0]) * one[1] <= MAX_LAYERS
        ):
            allowed = f"a list of [kinds, number] pairs, with kinds of {_GLOBAL} or {_LOCAL}"
            raise bad_field("attention_types", types, allowed)
        kinds += one[0] * one[1]
    return kinds


def _all_known(kinds: object) -> bool:
    return isinstance(kinds, list) and all(kind in (_GLOBAL, _LOCAL) for kind in kinds)


family = GptNeoFamily()
