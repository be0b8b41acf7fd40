"""The Granite MoE family: Granite's decoder with a mixture of experts in place of MLPs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from enginebay.contracts.model import Model, ModelFamily
from enginebay_models.blocks import FusedMlp, InputRule, LogitRule, Residual
from enginebay_models.decoder import Mixer, Variant, build_decoder
from enginebay_models.experts import (
    Experts,
    ExpertsConfig,
    SharedExperts,
    experts_or_mlp,
    read_counts,
)
from enginebay_models.fields import flag, number
from enginebay_models.hf_config import DecoderConfig, read_decoder

_DEFAULTS: dict[str, Any] = {"max_position_embeddings": 2048}
_NAMES = {
    ".mlp.": ".block_sparse_moe.",
    ".gate.": ".router.layer.",
    "experts.gate_up_proj": "input_linear",
    "experts.down_proj": "output_linear",
    "shared_mlp.gate_up_proj": "shared_mlp.input_linear",
    "shared_mlp.down_proj": "shared_mlp.output_linear",
}
"""(part of a name in other families, part in this checkpoint) pairs."""


class GraniteMoeFamily(ModelFamily):
    """Full attention, with the multipliers of `granite`; MLPs of experts, whose weights are
    normalised to sum 1. Biases: `attention_bias`.
    """

    name = "granitemoe"
    architectures = ("GraniteMoeForCausalLM",)

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
        )


def build_granite_moe(
    family: str,
    config: Mapping[str, Any],
    *,
    dtype: str,
    num_shards: int,
    max_model_len: int | None,
    shared_width: int = 0,
    no_experts: bool = False,
    rotated: bool = True,
    make_mixer: Callable[[DecoderConfig], Mixer | None] = lambda _: None,
) -> Model:
    """Return a model of Granite's decoder and experts. With a `shared_width`, an MLP of this width
    computes every token too, with `no_experts` alone. `rotated`: attention has rotary positions.
    `make_mixer` returns what some layers have in place of attention.
    """
    decoder = read_decoder(_DEFAULTS | dict(config), max_model_len=max_model_len)
    num_layers = decoder.num_layers
    counts = (1, 1) if no_experts else read_counts(config, count=8, chosen=2)
    experts = ExpertsConfig(
        *counts,
        decoder.intermediate_size,
        is_normed=True,
        plain_layers=frozenset(),
        is_fused=True,
    )

    def shared(name: str, *_: Any, **__: Any) -> FusedMlp:
        prefix, size = f"{name.removesuffix('mlp')}shared_mlp", decoder.hidden_size
        return FusedMlp(prefix, size, shared_width, activation=decoder.activation)

    def with_shared(name: str, routed: Experts) -> Experts | SharedExperts:
        return SharedExperts(routed, shared(name)) if shared_width else routed

    bias = flag(config, "attention_bias", default=False)
    variant = Variant(
        windows=(None,) * num_layers,
        qkv_bias=bias,
        out_bias=bias,
        softmax_scale=number(config, "attention_multiplier", 1.0),
        residual=Residual(scale=number(config, "residual_multiplier", 1.0)),
        inputs=InputRule(scale=number(config, "embedding_multiplier", 1.0)),
        logits=LogitRule(scale=1.0 / number(config, "logits_scaling", 1.0)),
        mlp=shared if no_experts else experts_or_mlp(decoder, experts, with_shared),
        mlp_config=(experts, shared_width),
        mixer=make_mixer(decoder),
        unrotated_layers=frozenset() if rotated else frozenset(range(num_layers)),
        names=_NAMES,
    )
    return build_decoder(family, decoder, variant, dtype=dtype, num_shards=num_shards)


family = GraniteMoeFamily()
