"""The Granite 4 family: layers with attention and layers with Mamba-2, with experts or without."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.contracts.model import Model, ModelFamily
from enginebay_models.decoder import Mixer
from enginebay_models.fields import bad_field, positive, whole_number
from enginebay_models.granitemoe import build_granite_moe
from enginebay_models.hf_config import FULL, DecoderConfig
from enginebay_models.mamba_mixer import (
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

_ATTENTION, _MAMBA = ("attention", FULL), ("mamba", "linear_attention")
"""Names of the kinds of layers, older and newer."""
_NAMES = FieldNames("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")


class GraniteMoeHybridFamily(ModelFamily):
    """Layers with Mamba-2 or with full attention, as `layer_types` says; both with the multipliers
    of `granite`.

    Attention has rotary positions if `position_embedding_type` is rope. An MLP of width
    `shared_intermediate_size` computes every token, beside `num_local_experts` experts, which may
    be 0. Biases: `attention_bias`, `mamba_conv_bias`, `mamba_proj_bias`.
    """

    name = "granitemoehybrid"
    architectures = ("GraniteMoeHybridForCausalLM",)

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        return build_granite_moe(
            self.name,
            config,
            dtype=dtype,
            num_shards=num_shards,
            max_model_len=max_model_len,
            shared_width=positive(config, "shared_intermediate_size", 1024),
            no_experts=whole_number(config, "num_local_experts", 8, least=0) == 0,
            rotated=_is_rotated(config),
            make_mixer=lambda decoder: _mixer(config, decoder, dtype),
        )


def _is_rotated(config: Mapping[str, Any]) -> bool:
    found = config.get("position_embedding_type")
    if found not in (None, "nope", "rope"):
        raise bad_field("position_embedding_type", found, "rope, nope or null")
    return found == "rope"


def _mixer(config: Mapping[str, Any], decoder: DecoderConfig, dtype: str) -> Mixer | None:
    """Return the Mamba-2 layers; None if all have attention."""
    kinds = config.get("layer_types", config.get("layers_block_type"))
    allowed = (*_ATTENTION, *_MAMBA)
    if (
        not isinstance(kinds, list)
        or any(kind not in allowed for kind in kinds)
        or not any(kind in _ATTENTION for kind in kinds)
    ):
        wanted = f"{decoder.num_layers} of attention or mamba, at least one of them attention"
        raise bad_field("layer_types", kinds, wanted, is_null="layer_types" in config)
    if len(kinds) != decoder.num_layers:
        wanted = f"{len(kinds)}, as many as layer_types has"
        raise bad_field("num_hidden_layers", decoder.num_layers, wanted)
    layers = tuple(i for i, kind in enumerate(kinds) if kind in _MAMBA)
    if not layers:
        return None
    heads, groups, state_size, taps = read_sizes(config, _NAMES, heads=128, state_size=256)
    inner = read_inner(config, decoder.hidden_size)
    mamba = MambaConfig(
        decoder.hidden_size,
        heads,
        read_head_dim(config, inner, heads, "mamba_expand * hidden_size"),
        groups,
        state_size,
        taps,
        dtype,
        GatedNorm(decoder.norm_eps, groups),
        read_biases(config),
        activation=decoder.activation,
        step_limits=read_limits(config),
    )
    return Mixer(
        lambda prefix: Mamba(f"{prefix}.mamba", mamba),
        layers,
        mamba.states(len(layers)),
        config=mamba,
    )


family = GraniteMoeHybridFamily()
