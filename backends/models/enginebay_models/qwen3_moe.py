"""The Qwen3-MoE family: Qwen3 with a mixture of experts in place of MLPs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.contracts.model import Model, ModelFamily
from enginebay_models.blocks import Mlp
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.experts import Experts, ExpertsConfig
from enginebay_models.fields import bad_field, flag, positive
from enginebay_models.hf_config import DEFAULT_WINDOW, read_decoder

_DEFAULT_KV_HEADS = 4
_DEFAULT_EXPERTS, _DEFAULT_CHOSEN, _DEFAULT_WIDTH = 128, 8, 768


def read_experts(config: Mapping[str, Any], num_layers: int) -> ExpertsConfig:
    """Read the fields of the experts; CheckpointError names a wrong one."""
    name = "num_local_experts" if "num_local_experts" in config else "num_experts"
    count = positive(config, name, _DEFAULT_EXPERTS)
    chosen = positive(config, "num_experts_per_tok", _DEFAULT_CHOSEN, most=count)
    step = positive(config, "decoder_sparse_step", 1)
    plain = config.get("mlp_only_layers") or []
    if not isinstance(plain, list) or any(type(layer) is not int for layer in plain):
        raise bad_field("mlp_only_layers", plain, "a list of layer indices")
    sparse = {layer for layer in range(num_layers) if (layer + 1) % step == 0} - set(plain)
    return ExpertsConfig(
        count,
        chosen,
        positive(config, "moe_intermediate_size", _DEFAULT_WIDTH),
        flag(config, "norm_topk_prob", default=False),
        frozenset(range(num_layers)) - sparse,
    )


def _window(config: Mapping[str, Any]) -> int | None:
    """Return the sliding window of all layers, or None."""
    if flag(config, "use_sliding_window", default=False):
        if config.get("sliding_window", DEFAULT_WINDOW) is not None:
            return positive(config, "sliding_window", DEFAULT_WINDOW)
    return None


class Qwen3MoeFamily(ModelFamily):
    """Full attention, or with `use_sliding_window` a window in every layer; norms of queries and
    keys; MLPs of experts.

    The default of `head_dim` is hidden_size / num_attention_heads. Biases: `attention_bias`.
    """

    name = "qwen3_moe"
    architectures = ("Qwen3MoeForCausalLM",)

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        decoder = read_decoder(config, kv_heads=_DEFAULT_KV_HEADS, max_model_len=max_model_len)
        experts = read_experts(config, decoder.num_layers)
        bias = flag(config, "attention_bias", default=False)
        windows = (_window(config),) * decoder.num_layers

        def make_mlp(name: str, *sizes: int, **choices: Any) -> Mlp | Experts:
            is_plain = int(name.split(".")[2]) in experts.plain_layers
            return Mlp(name, *sizes, **choices) if is_plain else Experts(name, decoder, experts)

        variant = Variant(
            windows=windows,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=True,
            mlp=make_mlp,
            mlp_config=experts,
        )
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


family = Qwen3MoeFamily()
