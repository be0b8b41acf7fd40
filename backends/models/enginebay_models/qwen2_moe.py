"""The Qwen2-MoE family: Qwen2 with routed experts and a gated shared one in place of MLPs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.contracts.model import Model, ModelFamily
from enginebay_models.blocks import Mlp
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.experts import Experts, SharedExperts, experts_or_mlp, read_experts
from enginebay_models.fields import bad_field, flag, positive
from enginebay_models.hf_config import DEFAULT_WINDOW, layer_windows, read_decoder

_DEFAULTS: dict[str, Any] = {"max_position_embeddings": 32768}


def windows_of(config: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Return the window of each layer; None is full attention."""
    if config.get("layer_types") is not None or not flag(
        config, "use_sliding_window", default=False
    ):
        return layer_windows(config, num_layers)
    if config.get("sliding_window", DEFAULT_WINDOW) is None:
        return (None,) * num_layers
    window = positive(config, "sliding_window", DEFAULT_WINDOW)
    first = config.get("max_window_layers", 28)
    if type(first) is not int or first < 0:
        raise bad_field("max_window_layers", first, "a whole number of layers")
    return tuple(window if i % 2 == 0 and i < first else None for i in range(num_layers))


class Qwen2MoeFamily(ModelFamily):
    """Full attention; with `use_sliding_window`, a window in every other layer below
    `max_window_layers`, as in transformers, or as `layer_types` says. Biases of queries, keys and
    values: `qkv_bias`, true if absent.

    A shared expert computes every token; the sigmoid of a product with the token scales it.
    """

    name = "qwen2_moe"
    architectures = ("Qwen2MoeForCausalLM",)

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        decoder = read_decoder(_DEFAULTS | dict(config), kv_heads=16, max_model_len=max_model_len)
        experts = read_experts(config, decoder.num_layers, count=60, chosen=4, width=1408)
        width = positive(config, "shared_expert_intermediate_size", 5632)

        def shared(name: str, routed: Experts) -> SharedExperts:
            size = decoder.hidden_size
            mlp = Mlp(f"{name}.shared_expert", size, width, activation=decoder.activation)
            return SharedExperts(routed, mlp, f"{name}.shared_expert_gate.weight", size)

        variant = Variant(
            windows=windows_of(config, decoder.num_layers),
            qkv_bias=flag(config, "qkv_bias", default=True),
            mlp=experts_or_mlp(decoder, experts, shared),
            mlp_config=(experts, width),
        )
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


family = Qwen2MoeFamily()
