"""The Gemma 3 family (text): most layers have a window, every sixth one is full. Each kind has its
own rotary positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.contracts.model import Model, ModelFamily
from enginebay_models.blocks import InputRule, LogitRule
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.fields import bad_field, flag, number, positive
from enginebay_models.hf_config import (
    DEFAULT_WINDOW,
    FULL,
    SLIDING,
    mixed_windows,
    read_decoder,
)
from enginebay_models.rope_config import check_spec, read_rope

_DEFAULT_HEAD_DIM = 256
_DEFAULT_KV_HEADS = 4
_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
"""What transformers takes for fields that the configuration of Gemma 3 4B leaves out."""
_DEFAULT_THETA = {FULL: 1_000_000.0, SLIDING: 10_000.0}
_DEFAULT_PATTERN = 6
"""Every sixth layer has full attention."""


class Gemma3Family(ModelFamily):
    """A window in the layers that `layer_types` or `sliding_window_pattern` (6 if absent) names,
    with rotary positions of their own.

    Norms of queries and keys, and before and after attention and MLP, with factors 1 + weight;
    scaled embeddings. Biases: `attention_bias`.
    """

    name = "gemma3"
    architectures = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        if flag(config, "use_bidirectional_attention", default=False):
            raise bad_field("use_bidirectional_attention", value=True, allowed="false or absent")
        # Names and defaults that differ from those of the shared reader.
        shared = dict(_DEFAULTS) | dict(config)
        shared["hidden_act"] = config.get("hidden_activation", "gelu_pytorch_tanh")
        decoder = read_decoder(
            _with_rope(shared, FULL),
            head_dim=_DEFAULT_HEAD_DIM,
            kv_heads=_DEFAULT_KV_HEADS,
            max_model_len=max_model_len,
        )
        window_rope = read_rope(_with_rope(shared, SLIDING)).spec(decoder.head_dim, max_model_len)
        check_spec(window_rope)
        cap = config.get("final_logit_softcapping")
        bias = flag(config, "attention_bias", default=False)
        variant = Variant(
            windows=_windows(config, decoder.num_layers),
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=True,
            window_rope=window_rope,
            softmax_scale=number(config, "query_pre_attn_scalar", 256.0) ** -0.5,
            out_norms=True,
            norm_offset=1.0,
            inputs=InputRule(scale=decoder.hidden_size**0.5),
            logits=LogitRule(
                cap=None if cap is None else number(config, "final_logit_softcapping", cap)
            ),
        )
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


def _windows(config: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Return the window of each layer, None for full attention."""
    window = positive(config, "sliding_window", DEFAULT_WINDOW)
    every = positive(config, "sliding_window_pattern", _DEFAULT_PATTERN)
    return mixed_windows(config, num_layers, window, every=every)


def _with_rope(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the configuration with the rotary fields of one kind of layer only.

    The rules are those of transformers. `rope_parameters` has one entry per kind. Before
    transformers 5, `rope_scaling` is for full layers and `rope_local_base_freq` for the others.
    """
    fields = dict(config)
    nested = fields.pop("rope_parameters", None)
    theta = config.get("rope_theta" if kind == FULL else "rope_local_base_freq")
    fields["rope_theta"] = _DEFAULT_THETA[kind] if theta is None else theta
    if kind == SLIDING:
        fields.pop("rope_scaling", None)
    if nested is not None:
        if not isinstance(nested, Mapping) or not isinstance(nested.get(kind, {}), Mapping):
            raise bad_field("rope_parameters", nested, f"an object by {FULL} and {SLIDING}")
        fields["rope_parameters"] = nested.get(kind)
    return fields


family = Gemma3Family()
