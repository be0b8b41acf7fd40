"""The SmolLM3 family: Llama without rotary positions in every fourth layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.contracts.model import Model, ModelFamily
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.fields import bad_field, flag, positive
from enginebay_models.hf_config import FULL, SLIDING, check_layer_types, read_decoder

_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 32768,
    "rope_theta": 2000000.0,
    "tie_word_embeddings": True,
}


class SmolLm3Family(ModelFamily):
    """Full attention, without rotary positions in every `no_rope_layer_interval`-th layer, or as
    `no_rope_layers` says.

    With `use_sliding_window` these layers have a window. Biases: `attention_bias`, `mlp_bias`.
    """

    name = "smollm3"
    architectures = ("SmolLM3ForCausalLM",)

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        decoder = read_decoder(_DEFAULTS | dict(config), kv_heads=4, max_model_len=max_model_len)
        unrotated = _unrotated(config, decoder.num_layers)
        bias = flag(config, "attention_bias", default=False)
        variant = Variant(
            windows=_windows(config, decoder.num_layers, unrotated),
            unrotated_layers=unrotated,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=flag(config, "mlp_bias", default=False),
        )
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


def _unrotated(config: Mapping[str, Any], num_layers: int) -> frozenset[int]:
    """Return the layers without rotary positions: the zeros of no_rope_layers, or every
    no_rope_layer_interval-th.
    """
    given = config.get("no_rope_layers")
    if given is None:
        every = positive(config, "no_rope_layer_interval", 4)
        return frozenset(range(every - 1, num_layers, every))
    if (
        not isinstance(given, list)
        or len(given) != num_layers
        or any(one not in (0, 1) for one in given)
    ):
        raise bad_field("no_rope_layers", given, f"a list of {num_layers} numbers, 0 or 1")
    return frozenset(layer for layer, has_rope in enumerate(given) if not has_rope)


def _windows(
    config: Mapping[str, Any], num_layers: int, unrotated: frozenset[int]
) -> tuple[int | None, ...]:
    """Return the window of each layer, None for full attention."""
    kinds = check_layer_types(config, num_layers, (FULL, SLIDING))
    on = flag(config, "use_sliding_window", default=False)
    if not on or config.get("sliding_window") is None:
        if SLIDING in kinds:
            raise bad_field("layer_types", kinds, f"{FULL} alone without use_sliding_window")
        return (None,) * num_layers
    if not kinds:
        kinds = [SLIDING if layer in unrotated else FULL for layer in range(num_layers)]
    window = positive(config, "sliding_window")
    return tuple(window if kind == SLIDING else None for kind in kinds)


family = SmolLm3Family()
