"""The Falcon-H1 family: attention and Mamba-2 side by side in every layer, and many multipliers."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from enginebay.contracts.model import Model, ModelFamily
from enginebay.ops.bound import Ops
from enginebay.ops.linear import LINEAR
from enginebay_models.activations import ACTIVATIONS
from enginebay_models.blocks import Attention, InputRule, LogitRule, Mlp, value_of
from enginebay_models.decoder import Mixer, Variant, build_decoder
from enginebay_models.fields import bad_field, flag, is_number, number, positive
from enginebay_models.hf_config import DecoderConfig, read_decoder
from enginebay_models.mamba_mixer import (
    AttentionBeside,
    Factors,
    FieldNames,
    GatedNorm,
    Mamba,
    MambaConfig,
    read_biases,
    read_head_dim,
    read_inner,
    read_limits,
    read_sizes,
)

_DEFAULTS: dict[str, Any] = {"max_position_embeddings": 8192, "rms_norm_eps": 1e-5}
_KV_HEADS, _INNER = 8, 1024
_NAMES = {
    ".mlp.": ".feed_forward.",
    ".post_attention_layernorm.": ".pre_ff_layernorm.",
    "model.norm.": "model.final_layernorm.",
}
"""(part of a name in other families, part in this checkpoint) pairs."""
_FIELDS = FieldNames("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")


class ScaledMlp(Mlp):
    """down(activation(gate(x) * first) * up(x)) * last, for constants `factors` (first, last)."""

    def __init__(
        self, factors: tuple[float, float], name: str, *sizes: int, **choices: Any
    ) -> None:
        super().__init__(name, *sizes, **choices)
        self.factors = factors

    def __call__(self, x: jax.Array, ops: Ops) -> jax.Array:
        """Return [T, hidden] for x [T, hidden]."""
        first, last = (jnp.asarray(one, x.dtype) for one in self.factors)
        gate = ops[LINEAR](x, self.gate.get_value(), value_of(self.gate_bias)) * first
        up = ops[LINEAR](x, self.up.get_value(), value_of(self.up_bias))
        opened = ACTIVATIONS[self.activation](gate.astype(jnp.float32)).astype(x.dtype) * up
        return ops[LINEAR](opened, self.down.get_value(), value_of(self.down_bias)) * last


class FalconH1Family(ModelFamily):
    """Full attention and Mamba-2 read the same in every layer, and their results are added.

    Multipliers: those of embeddings, logits and keys, of what attention and Mamba-2 read and of
    their results, of the five parts of Mamba-2's projection, and of the MLP's gate and result. With
    `mamba_rms_norm` the outputs of the scan are normed, before or behind their gate. Biases:
    `attention_bias`, `mlp_bias`, `mamba_conv_bias`, `mamba_proj_bias`, `projectors_bias`.
    """

    name = "falcon_h1"
    architectures = ("FalconH1ForCausalLM",)

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        shared = _DEFAULTS | dict(config)
        decoder = read_decoder(shared, kv_heads=_KV_HEADS, max_model_len=max_model_len)
        bias, mlp = flag(config, "attention_bias", default=False), _factors(config, "mlp", 2)
        key = number(config, "key_multiplier", 1.0)
        variant = Variant(
            windows=(None,) * decoder.num_layers,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=flag(config, "mlp_bias", default=False),
            # Scores are linear in the keys.
            softmax_scale=key / math.sqrt(decoder.head_dim),
            inputs=InputRule(scale=number(config, "embedding_multiplier", 1.0)),
            logits=LogitRule(scale=number(config, "lm_head_multiplier", 1.0)),
            mlp=functools.partial(ScaledMlp, mlp),
            mlp_config=mlp,
            mixer=_mixer(config, decoder, dtype),
            names=_NAMES,
        )
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


def _factors(config: Mapping[str, Any], of: str, count: int) -> Any:
    """Read a list of so many multipliers, 1 each if the field is absent or null."""
    name = f"{of}_multipliers"
    found = config.get(name)
    if found is None:
        return (1.0,) * count
    if not isinstance(found, list) or len(found) != count or not all(map(is_number, found)):
        raise bad_field(name, found, f"{count} numbers")
    return tuple(map(float, found))


def _mixer(config: Mapping[str, Any], decoder: DecoderConfig, dtype: str) -> Mixer:
    """Return the Mamba-2 layers beside attention."""
    heads, groups, state_size, taps = read_sizes(config, _FIELDS, heads=128, state_size=256)
    if config.get("mamba_d_ssm", _INNER) is None:
        inner, origin = read_inner(config, decoder.hidden_size), "mamba_expand * hidden_size"
    else:
        inner, origin = positive(config, "mamba_d_ssm", _INNER), "mamba_d_ssm"
    norm = None
    if flag(config, "mamba_rms_norm", default=False):
        is_first = flag(config, "mamba_norm_before_gate", default=True)
        norm = GatedNorm(decoder.norm_eps, groups, is_first)
    out_bias = flag(config, "projectors_bias", default=False)
    mamba = MambaConfig(
        decoder.hidden_size,
        heads,
        read_head_dim(config, inner, heads, origin),
        groups,
        state_size,
        taps,
        dtype,
        norm,
        dataclasses.replace(read_biases(config), out=out_bias),
        activation=decoder.activation,
        step_limits=read_limits(config),
        factors=Factors(
            number(config, "ssm_in_multiplier", 1.0),
            _factors(config, "ssm", 5),
            number(config, "ssm_out_multiplier", 1.0),
        ),
    )
    ways = tuple(number(config, f"attention_{way}_multiplier", 1.0) for way in ("in", "out"))

    def join(attention: Attention, made: Mamba) -> AttentionBeside:
        return AttentionBeside(attention, made, (ways[0], ways[1]))

    layers = tuple(range(decoder.num_layers))
    return Mixer(
        lambda prefix: Mamba(f"{prefix}.mamba", mamba),
        layers,
        mamba.states(len(layers)),
        join=join,
        config=(mamba, ways),
    )


family = FalconH1Family()
