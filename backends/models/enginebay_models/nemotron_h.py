"""The Nemotron-H family (Nemotron-H, Nemotron 3): layers of one block each, which is Mamba-2,
attention, an MLP or experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from enginebay.contracts.model import Model, ModelFamily
from enginebay_models.blocks import plain_mlp
from enginebay_models.decoder import Mixer, Variant, build_decoder
from enginebay_models.experts import Experts, SharedExperts, read_sigmoid_experts
from enginebay_models.fields import bad_field, flag, positive, refuse_others, with_own_names
from enginebay_models.hf_config import FULL, MAX_LAYERS, DecoderConfig, activation, read_decoder
from enginebay_models.mamba_mixer import (
    Biases,
    FieldNames,
    GatedNorm,
    Mamba,
    MambaConfig,
    read_limits,
    read_sizes,
)

_MAMBA, _MLP, _EXPERTS = "linear_attention", "mlp", "moe"
_LETTERS = {"M": _MAMBA, "*": FULL, "-": _MLP, "E": _EXPERTS}
"""What the letters of hybrid_override_pattern stand for."""
_OLDER = {"mamba": _MAMBA, "attention": FULL}
"""Older names of kinds of layers."""
_DEFAULTS: dict[str, Any] = {"intermediate_size": 21504, "max_position_embeddings": 4096}
_HEAD_DIM, _KV_HEADS = 128, 8
_FIELDS = FieldNames("mamba_num_heads", "n_groups", "ssm_state_size", "conv_kernel")
_USUAL = {
    "n_groups": "mamba_n_groups",
    "conv_kernel": "mamba_d_conv",
    "use_conv_bias": "mamba_conv_bias",
    "time_step_limit": "mamba_dt_limit",
    "layers_block_type": "layer_types",
    "n_routed_experts": "num_local_experts",
}
"""Own name of a field -> name that a file may have instead."""
_NAMES = {
    "model.embed_tokens.": "model.embeddings.",
    "model.norm.": "model.norm_f.",
    ".input_layernorm.": ".norm.",
    ".post_attention_layernorm.": ".norm.",
    ".self_attn.": ".mixer.",
    ".mamba.": ".mixer.",
    ".mlp.": ".mixer.",
    "model.": "backbone.",
}
"""(part of a name in other families, part in this checkpoint) pairs."""


class NemotronHFamily(ModelFamily):
    """Layers of one block with one norm: Mamba-2, full attention without positions, an MLP without
    a gate, or experts without gates, as `layers_block_type` says or the letters M, *, - and E of
    `hybrid_override_pattern`; `num_hidden_layers` is not read.

    Experts are chosen as in `deepseek_v3`; with `moe_latent_size` they read a projection to it. A
    shared one computes every token. The steps (dt) of Mamba-2 are clipped to `time_step_limit`.
    transformers ignores that field, and raises the steps of prompts, but not those of new tokens,
    to `time_step_min`: its logits may differ. Biases: `mlp_bias`, `use_bias` of Mamba-2's
    projections, `use_conv_bias`.
    """

    name = "nemotron_h"
    architectures = ("NemotronHForCausalLM",)

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        refuse_others(config, {"attention_bias": False})
        own = with_own_names(config, _USUAL)
        kinds = _read_kinds(own)
        shared = {
            "hidden_act": activation(config, "mlp_hidden_act", "relu2"),
            "num_hidden_layers": len(kinds),
        }
        decoder = read_decoder(
            _DEFAULTS | dict(config) | shared,
            head_dim=_HEAD_DIM,
            kv_heads=_KV_HEADS,
            max_model_len=max_model_len,
            eps=("layer_norm_epsilon", 1e-5),
        )
        every = range(decoder.num_layers)
        make_mlp, mlp_config = _mlps(own, decoder, kinds)
        variant = Variant(
            windows=(None,) * decoder.num_layers,
            mlp_bias=flag(config, "mlp_bias", default=False),
            unrotated_layers=frozenset(every),
            mlp=make_mlp,
            mlp_config=mlp_config,
            mixer=_mixer(own, decoder, kinds, dtype),
            mlp_layers=frozenset(i for i in every if kinds[i] in (_MLP, _EXPERTS)),
            names=_NAMES,
            unused=("mtp.",),
        )
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


def _read_kinds(config: Mapping[str, Any]) -> list[str]:
    """Read the kind of each layer; at least one is attention."""
    name, found = "layers_block_type", config.get("layers_block_type")
    if found is None and config.get("hybrid_override_pattern") is not None:
        name, found = "hybrid_override_pattern", config["hybrid_override_pattern"]
        kinds = [_LETTERS.get(letter) for letter in found] if isinstance(found, str) else [None]
        allowed = "letters M, *, - and E, at least one of them *"
    else:
        listed = found if isinstance(found, list) else [None]
        kinds = [_OLDER.get(one, one) if isinstance(one, str) else None for one in listed]
        allowed = f"a list of {', '.join(_LETTERS.values())}, at least one of them {FULL}"
    if FULL not in kinds or any(kind not in _LETTERS.values() for kind in kinds):
        raise bad_field(name, found, allowed, is_null=name in config)
    if len(kinds) > MAX_LAYERS:
        raise bad_field(name, f"{len(kinds)} layers", f"at most {MAX_LAYERS}")
    return [kind for kind in kinds if kind is not None]


def _mlps(
    config: Mapping[str, Any], decoder: DecoderConfig, kinds: list[str]
) -> tuple[Callable[..., Any], Any]:
    """Return the function that makes a layer's MLP or experts, and what names its constants."""
    if _EXPERTS not in kinds:
        return plain_mlp, None
    routed = read_sigmoid_experts(
        {"num_experts_per_tok": 2, "first_k_dense_replace": 0} | dict(config),
        decoder.num_layers,
        count=8,
        width=7688,
        groups=(1, 1),
        first=0,
        scale=1.0,
    )
    latent = config.get("moe_latent_size")
    bias = flag(config, "mlp_bias", default=False)
    experts = dataclasses.replace(
        routed,
        is_gated=False,
        latent=None if latent is None else positive(config, "moe_latent_size"),
        latent_bias=bias and latent is not None,
    )
    width = positive(config, "moe_shared_expert_intermediate_size", 7688)

    def make(name: str, *sizes: int, **choices: Any) -> Any:
        if kinds[int(name.split(".")[2])] == _MLP:
            return plain_mlp(name, *sizes, **choices)
        shared = plain_mlp(f"{name}.shared_experts", decoder.hidden_size, width, **choices)
        return SharedExperts(Experts(name, decoder, experts), shared)

    return make, (experts, width)


def _mixer(
    config: Mapping[str, Any], decoder: DecoderConfig, kinds: list[str], dtype: str
) -> Mixer | None:
    """Return the Mamba-2 layers; None if there are none."""
    layers = tuple(i for i, kind in enumerate(kinds) if kind == _MAMBA)
    if not layers:
        return None
    heads, groups, state_size, taps = read_sizes(
        config, _FIELDS, heads=128, state_size=128, groups=8
    )
    both = flag(config, "use_bias", default=False)
    mamba = MambaConfig(
        decoder.hidden_size,
        heads,
        positive(config, "mamba_head_dim", 64),
        groups,
        state_size,
        taps,
        dtype,
        GatedNorm(decoder.norm_eps, groups),
        Biases(flag(config, "use_conv_bias", default=True), both, both),
        activation=activation(config, "mamba_hidden_act", "silu"),
        step_limits=read_limits(config),
    )
    return Mixer(
        lambda prefix: Mamba(f"{prefix}.mamba", mamba),
        layers,
        mamba.states(len(layers)),
        config=mamba,
    )


family = NemotronHFamily()
