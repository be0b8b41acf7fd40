"""The Mixtral family: Mistral's decoder with a mixture of experts in place of MLPs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.contracts.model import Model, ModelFamily
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.experts import ExpertsConfig, experts_or_mlp, read_counts
from enginebay_models.hf_config import every_window, read_decoder

_DEFAULTS: dict[str, Any] = {"max_position_embeddings": 131072, "rope_theta": 1e6}
_NAMES = {
    ".mlp.": ".block_sparse_moe.",
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
}
"""(part of a name in other families, part in this checkpoint) pairs."""


class MixtralFamily(ModelFamily):
    """Full attention, or a window of `sliding_window` tokens in every layer; MLPs of experts, whose
    weights are normalised to sum 1.
    """

    name = "mixtral"
    architectures = ("MixtralForCausalLM",)

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
            kv_heads=8,
            max_model_len=max_model_len,
            eps=("rms_norm_eps", 1e-5),
        )
        experts = ExpertsConfig(
            *read_counts(config, count=8, chosen=2),
            decoder.intermediate_size,
            is_normed=True,
            plain_layers=frozenset(),
        )
        variant = Variant(
            windows=every_window(config, decoder.num_layers),
            mlp=experts_or_mlp(decoder, experts),
            mlp_config=experts,
            names=_NAMES,
        )
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


family = MixtralFamily()
