"""The Phi-3.5-MoE family: LayerNorms, and experts that are chosen one after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from enginebay.contracts.model import Model, ModelFamily
from enginebay_models.blocks import LogitRule
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.experts import ExpertsConfig, experts_or_mlp, read_counts
from enginebay_models.fields import bad_field, flag, is_number, number, refuse_others
from enginebay_models.hf_config import every_window, read_decoder
from enginebay_models.rope_config import read_rope

_DEFAULTS: dict[str, Any] = {"max_position_embeddings": 131072, "rope_theta": 1e6}
_NAMES = {
    ".mlp.": ".block_sparse_moe.",
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
}
"""(part of a name in other families, part in this checkpoint) pairs."""


@dataclasses.dataclass(frozen=True)
class SparseMixerConfig(ExpertsConfig):
    """Experts, of which each token has two: that with the best score, then the best of the others.

    The weight of either is its share in a softmax over itself and the experts left whose scores are
    near: at most `margin` below, relative to the larger of the best score and their own size.
    """

    margin: float = 0.02

    def route(
        self, scores: jax.Array, correction: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Return (weights, ids int32), both [T, 2], for scores f32 [T, experts]."""
        left, found = scores, []
        for _ in range(self.num_chosen):
            best = left.max(axis=-1, keepdims=True)
            far = (best - scores) / jnp.maximum(jnp.abs(scores), best) > self.margin
            near = jax.nn.softmax(jnp.where(far, -jnp.inf, left))
            chosen = left.argmax(axis=-1, keepdims=True)
            found.append((jnp.take_along_axis(near, chosen, axis=-1), chosen))
            left = jnp.where(jnp.arange(self.num_experts) == chosen, -jnp.inf, left)
        weights, ids = (jnp.concatenate(each, axis=-1) for each in zip(*found, strict=True))
        return weights, ids.astype(jnp.int32)


class PhimoeFamily(ModelFamily):
    """Full attention, or a window of `sliding_window` tokens; LayerNorm; two experts for each
    token, chosen with `router_jitter_noise`. Biases: `attention_bias`, `lm_head_bias`.

    `longrope` has scales of its own, `short_mscale` and `long_mscale`.
    """

    name = "phimoe"
    architectures = ("PhimoeForCausalLM",)

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        refuse_others(config, {"num_experts_per_tok": 2})
        decoder = read_decoder(
            _with_scale(_DEFAULTS | dict(config), max_model_len),
            kv_heads=8,
            max_model_len=max_model_len,
            eps=("rms_norm_eps", 1e-5),
        )
        noise = config.get("router_jitter_noise", 0.01)
        if not is_number(noise) or noise < 0:
            raise bad_field("router_jitter_noise", noise, "a number of at least 0", is_null=True)
        experts = SparseMixerConfig(
            *read_counts(dict(config) | {"num_experts_per_tok": 2}, count=16, chosen=2),
            decoder.intermediate_size,
            is_normed=False,
            plain_layers=frozenset(),
            margin=2 * noise,
        )
        bias = flag(config, "attention_bias", default=False)
        variant = Variant(
            windows=every_window(config, decoder.num_layers),
            qkv_bias=bias,
            out_bias=bias,
            layer_norms=True,
            norm_bias=True,
            logits=LogitRule(bias=flag(config, "lm_head_bias", default=False)),
            mlp=experts_or_mlp(decoder, experts),
            mlp_config=experts,
            names=_NAMES,
        )
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


def _with_scale(config: dict[str, Any], max_model_len: int | None) -> dict[str, Any]:
    """Return the configuration with the scale of a rule longrope for rows of this length where
    other families have it.
    """
    rules = read_rope(config)
    if rules.kind not in ("default", "longrope"):
        raise bad_field("rope_scaling.rope_type", rules.kind, "default, longrope")
    if rules.kind == "default":
        return config
    length = rules.auto_max_model_len if max_model_len is None else max_model_len
    for name in ("rope_parameters", "rope_scaling"):
        rule = config.get(name)
        if not rule:
            continue
        scales = {}
        for key in ("short_mscale", "long_mscale"):
            if not is_number(rule.get(key)):
                raise bad_field(f"{name}.{key}", rule.get(key), "a positive number")
            scales[key] = number(rule, key, 1.0, path=f"{name}.{key}")
        scale = scales["long_mscale" if length > rules.original else "short_mscale"]
        config = config | {name: dict(rule) | {"attention_factor": scale}}
    return config


family = PhimoeFamily()
