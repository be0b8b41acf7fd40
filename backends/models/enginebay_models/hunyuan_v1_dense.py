"""The Hunyuan family (dense): Llama with norms of queries and keys after their rotation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from enginebay.contracts.model import Model, ModelFamily
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.fields import bad_field, flag, number
from enginebay_models.hf_config import DecoderConfig, read_decoder

_DEFAULTS: dict[str, Any] = {"max_position_embeddings": 2048}
_NAMES = {
    "self_attn.q_norm.": "self_attn.query_layernorm.",
    "self_attn.k_norm.": "self_attn.key_layernorm.",
}
"""(name of a tensor in other families, name in this checkpoint) pairs."""


class HunyuanFamily(ModelFamily):
    """Full attention; queries and keys are normed after their rotation. Biases: `attention_bias`.

    A rotary rule `dynamic` with an `alpha` is the plain rule for a larger `rope_theta`.
    """

    name = "hunyuan_v1_dense"
    architectures = ("HunYuanDenseV1ForCausalLM",)

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        decoder = _read_with_alpha(_DEFAULTS | dict(config), max_model_len)
        bias = flag(config, "attention_bias", default=False)
        variant = Variant(
            windows=(None,) * decoder.num_layers,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=True,
            qk_norm_last=True,
            names=_NAMES,
        )
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


def _read_with_alpha(config: dict[str, Any], max_model_len: int | None) -> DecoderConfig:
    """Read the shared fields; with rotary frequencies of the base theta * alpha ** (d / (d - 2)),
    for heads of d features, if the rule has an alpha.
    """
    alphas = set[float]()
    for name in ("rope_parameters", "rope_scaling"):
        rule = config.get(name)
        if not isinstance(rule, Mapping):
            continue
        if rule.get("rope_type", rule.get("type")) == "dynamic" and rule.get("alpha"):
            alphas.add(number(rule, "alpha", 1.0, path=f"{name}.alpha"))
            theta = {key: rule[key] for key in ("rope_theta",) if key in rule}
            config[name] = {"rope_type": "default", **theta}
    decoder = read_decoder(config, max_model_len=max_model_len, eps=("rms_norm_eps", 1e-5))
    if not alphas:
        return decoder
    alpha, rope = alphas.pop(), decoder.rope
    if alphas:
        raise bad_field("rope_scaling.alpha", alphas.pop(), f"rope_parameters.alpha, {alpha}")
    if decoder.head_dim < 4:
        raise bad_field("head_dim", decoder.head_dim, "4 or more, with an alpha")
    theta = rope.theta * alpha ** (decoder.head_dim / (decoder.head_dim - 2))
    return dataclasses.replace(decoder, rope=dataclasses.replace(rope, theta=theta))


family = HunyuanFamily()
