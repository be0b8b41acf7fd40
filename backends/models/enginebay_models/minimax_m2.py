"""The MiniMax-M2 family: every layer has experts, chosen by sigmoids; one norm over all queries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.contracts.model import Model, ModelFamily
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.experts import ExpertsConfig, experts_or_mlp, read_counts
from enginebay_models.fields import bad_field, positive, refuse_others
from enginebay_models.hf_config import FULL, check_layer_types, read_decoder

_DEFAULTS: dict[str, Any] = {"max_position_embeddings": 196608, "rope_theta": 5e6}
_HEAD_DIM = 128
_NAMES = {
    ".mlp.": ".block_sparse_moe.",
    "gate.e_score_correction_bias": "e_score_correction_bias",
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
}
"""(part of a name in other families, part in this checkpoint) pairs."""


class MiniMaxM2Family(ModelFamily):
    """Full attention without biases, one norm each over all queries and all keys, rotary positions
    in `rotary_dim` features of each head.

    Experts are chosen by the sigmoids of their scores plus a learned correction; the weights of the
    chosen ones are normalised to sum 1.
    """

    name = "minimax_m2"
    architectures = ("MiniMaxM2ForCausalLM",)

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        refuse_others(
            config,
            {
                "attention_bias": False,
                "qk_norm_type": "per_layer",
                "scoring_func": "sigmoid",
                "shared_intermediate_size": 0,
                "use_qk_norm": True,
                "use_routing_bias": True,
            },
        )
        decoder = read_decoder(
            _with_partial(_DEFAULTS | dict(config)),
            head_dim=_HEAD_DIM,
            kv_heads=8,
            max_model_len=max_model_len,
            partial=True,
        )
        check_layer_types(config, decoder.num_layers, (FULL,))
        count, chosen = read_counts(config, count=256, chosen=8)
        experts = ExpertsConfig(
            count,
            chosen,
            decoder.intermediate_size,
            is_normed=True,
            plain_layers=frozenset(),
            scoring="sigmoid",
            correction=(count,),
        )
        variant = Variant(
            windows=(None,) * decoder.num_layers,
            qk_norm=True,
            qk_norm_joint=True,
            mlp=experts_or_mlp(decoder, experts),
            mlp_config=experts,
            names=_NAMES,
        )
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


def _with_partial(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with a partial_rotary_factor for its `rotary_dim`, if it has one."""
    if config.get("rotary_dim") is None:
        return dict(config)
    width = positive(config, "head_dim", _HEAD_DIM)
    share = positive(config, "rotary_dim", most=width) / width
    rules = config.get("rope_parameters")
    nested = rules.get("partial_rotary_factor") if isinstance(rules, Mapping) else None
    for given in (config.get("partial_rotary_factor"), nested):
        if given not in (None, share):
            allowed = f"{given * width:g}, as partial_rotary_factor = {given} says"
            raise bad_field("rotary_dim", config["rotary_dim"], allowed)
    return dict(config) | {"partial_rotary_factor": share}


family = MiniMaxM2Family()
