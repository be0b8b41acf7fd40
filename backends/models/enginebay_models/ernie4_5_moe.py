"""The ERNIE 4.5 MoE family: ERNIE 4.5 with routed and shared experts in place of most MLPs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.contracts.model import Model, ModelFamily
from enginebay_models.blocks import LogitRule, Mlp
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.experts import Experts, ExpertsConfig, SharedExperts, experts_or_mlp
from enginebay_models.fields import flag, number, positive, whole_number, with_own_names
from enginebay_models.hf_config import read_decoder
from enginebay_models.tensors import QkvRows

_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}
_USUAL = {"moe_num_experts": "num_experts", "moe_k": "num_experts_per_tok"}
"""Fields of config.json, and the names in other families, which they may have too."""
_NAMES = {".gate.e_score_correction_bias": ".moe_statics.e_score_correction_bias"}
"""(part of a name in other families, part in this checkpoint) pairs."""


class Ernie45MoeFamily(ModelFamily):
    """Full attention, with rotary pairs of neighbours; experts in the layers from
    `moe_layer_start_index` to `moe_layer_end_index`, each `moe_layer_interval`-th, and MLPs in
    others. Biases: `use_bias`, of all but experts.

    Experts are chosen by their softmax plus a learned correction. `moe_num_shared_experts` more
    compute every token.
    """

    name = "ernie4_5_moe"
    architectures = ("Ernie4_5_MoeForCausalLM",)

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        decoder = read_decoder(
            _DEFAULTS | dict(config),
            kv_heads=4,
            max_model_len=max_model_len,
            eps=("rms_norm_eps", 1e-5),
        )
        bias = flag(config, "use_bias", default=False)
        experts = _read_experts(with_own_names(config, _USUAL), decoder.num_layers)
        shared = whole_number(config, "moe_num_shared_experts", 2, least=0)

        def with_shared(name: str, routed: Experts) -> Any:
            if not shared:
                return routed
            sizes, act = (decoder.hidden_size, shared * experts.width), decoder.activation
            mlp = Mlp(f"{name}.shared_experts", *sizes, bias=bias, activation=act)
            return SharedExperts(routed, mlp)

        variant = Variant(
            windows=(None,) * decoder.num_layers,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=bias,
            qkv_rows=QkvRows(interleaved=decoder.rope.rotary_dim),
            logits=LogitRule(bias=bias),
            mlp=experts_or_mlp(decoder, experts, with_shared),
            mlp_config=(experts, shared),
            names=_NAMES,
            unused=("model.mtp_",),
        )
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


def _read_experts(config: Mapping[str, Any], num_layers: int) -> ExpertsConfig:
    """Read the fields of the experts; CheckpointError names a wrong one."""
    count = positive(config, "moe_num_experts", 64)
    first = whole_number(config, "moe_layer_start_index", 1, least=0)
    last = whole_number(config, "moe_layer_end_index", -1, least=-1)
    step = positive(config, "moe_layer_interval", 1)
    sparse = range(first, num_layers if last == -1 else min(last + 1, num_layers))
    return ExpertsConfig(
        count,
        positive(config, "moe_k", 6, most=count),
        positive(config, "moe_intermediate_size", 1536),
        is_normed=True,
        plain_layers=frozenset(
            layer for layer in range(num_layers) if layer not in sparse or (layer + 1) % step
        ),
        correction=(1, count),
        least_sum=number(config, "moe_norm_min", 1e-12),
    )


family = Ernie45MoeFamily()
