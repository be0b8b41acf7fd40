"""The OPT family (OPT, Galactica): learned positions, LayerNorms, and plain MLPs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.contracts.model import Model, ModelFamily
from enginebay_models.blocks import InputRule, plain_mlp
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.fields import flag, positive, refuse_others
from enginebay_models.hf_config import activation, read_decoder, with_equal_heads

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 50272,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
_EPS = 1e-5
"""The eps of all norms; config.json has none."""
_NAMES = {
    "model.": "model.decoder.",
    "model.decoder.norm.": "model.decoder.final_layer_norm.",
    "input_layernorm.": "self_attn_layer_norm.",
    "post_attention_layernorm.": "final_layer_norm.",
    "self_attn.o_proj.": "self_attn.out_proj.",
    "mlp.up_proj.": "fc1.",
    "mlp.down_proj.": "fc2.",
}
"""(name of a tensor in other families, name in this checkpoint) pairs."""


class OptFamily(ModelFamily):
    """Full attention without groups, learned positions, LayerNorm, a plain MLP.

    With `do_layer_norm_before` false, norms follow attention and MLP. `word_embed_proj_dim` is the
    width of the embedding. Biases: `enable_bias`; `layer_norm_elementwise_affine` false is refused.
    """

    name = "opt"
    architectures = ("OPTForCausalLM",)

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        refuse_others(config, {"layer_norm_elementwise_affine": True})
        shared = with_equal_heads(_DEFAULTS | dict(config)) | {
            "hidden_act": activation(config, "activation_function", "relu"),
            "intermediate_size": positive(config, "ffn_dim", 3072),
            "num_key_value_heads": None,
            "layer_norm_eps": _EPS,
        }
        decoder = read_decoder(
            shared | {"rope_parameters": None, "rope_scaling": None},
            max_model_len=max_model_len,
            eps=("layer_norm_eps", _EPS),
        )
        bias = flag(config, "enable_bias", default=True)
        before = flag(config, "do_layer_norm_before", default=True)
        removed = flag(config, "_remove_final_layer_norm", default=False)
        width = decoder.hidden_size
        if config.get("word_embed_proj_dim") is not None:
            width = positive(config, "word_embed_proj_dim")
        variant = Variant(
            windows=(None,) * decoder.num_layers,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=bias,
            unrotated_layers=frozenset(range(decoder.num_layers)),
            layer_norms=True,
            norm_bias=True,
            stream_norms=not before,
            final_norm=not (before and removed),
            inputs=InputRule(
                embed_size=None if width == decoder.hidden_size else width,
                num_positions=decoder.max_model_len,
                skipped_rows=2,
            ),
            mlp=plain_mlp,
            names=_NAMES,
        )
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


family = OptFamily()
