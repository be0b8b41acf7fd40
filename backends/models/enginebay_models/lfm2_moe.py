"""The LFM2-MoE family: LFM2 with a mixture of experts in place of most MLPs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.contracts.model import Model, ModelFamily
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.experts import ExpertsConfig, experts_or_mlp
from enginebay_models.fields import bad_field, flag, number, positive, whole_number
from enginebay_models.hf_config import FULL
from enginebay_models.lfm2 import CONV, NAMES, read_shared, short_convs

_NAMES = {".gate.e_score_correction_bias": ".expert_bias"} | NAMES
"""(part of a name in other families, part in this checkpoint) pairs."""


class Lfm2MoeFamily(ModelFamily):
    """Layers as those of `lfm2`; MLPs in the first `num_dense_layers`, and experts in the others.

    Experts are chosen by their sigmoid, plus a learned correction if `use_expert_bias`.
    """

    name = "lfm2_moe"
    architectures = ("Lfm2MoeForCausalLM",)

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        decoder = read_shared({"max_position_embeddings": 128000} | dict(config), max_model_len)
        if config.get("layer_types") is None and config.get("full_attn_idxs") is None:
            allowed, is_null = f"{decoder.num_layers} of {FULL} or {CONV}", "layer_types" in config
            raise bad_field("layer_types", None, allowed, is_null=is_null)
        experts = _read_experts(config, decoder.num_layers)
        variant = Variant(
            windows=(None,) * decoder.num_layers,
            qk_norm=True,
            mlp=experts_or_mlp(decoder, experts),
            mlp_config=experts,
            mixer=short_convs(config, decoder, dtype),
            names=_NAMES,
        )
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


def _read_experts(config: Mapping[str, Any], num_layers: int) -> ExpertsConfig:
    """Read the fields of the experts; CheckpointError names a wrong one."""
    count = positive(config, "num_experts", 32)
    plain = whole_number(config, "num_dense_layers", 2, least=0)
    return ExpertsConfig(
        count,
        positive(config, "num_experts_per_tok", 4, most=count),
        positive(config, "moe_intermediate_size", 1792),
        flag(config, "norm_topk_prob", default=True),
        frozenset(range(min(plain, num_layers))),
        scale=number(config, "routed_scaling_factor", 1.0),
        scoring="sigmoid",
        correction=(count,) if flag(config, "use_expert_bias", default=True) else None,
        added_to_sum=1e-6,
    )


family = Lfm2MoeFamily()
