"""The EXAONE 4 family: norms of the results alone, and windows where positions are rotary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.contracts.model import Model, ModelFamily
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.fields import positive
from enginebay_models.hf_config import DEFAULT_WINDOW, every_window, mixed_windows, read_decoder

_DEFAULTS: dict[str, Any] = {"max_position_embeddings": 2048}


class Exaone4Family(ModelFamily):
    """A window and rotary positions, but neither in every `sliding_window_pattern`-th layer, or as
    `layer_types` says; full attention and rotary positions if `sliding_window` is null.

    Norms of queries and keys, and of the results of attention and MLP.
    """

    name = "exaone4"
    architectures = ("Exaone4ForCausalLM",)

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
            kv_heads=32,
            max_model_len=max_model_len,
            eps=("rms_norm_eps", 1e-5),
        )
        windows = _windows(config, decoder.num_layers)
        mixes = config.get("sliding_window", DEFAULT_WINDOW) is not None
        full = frozenset(layer for layer, window in enumerate(windows) if window is None)
        variant = Variant(
            windows=windows,
            unrotated_layers=full if mixes else frozenset(),
            qk_norm=True,
            in_norms=False,
            out_norms=True,
        )
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


def _windows(config: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Return the window of each layer, None for full attention."""
    if "sliding_window" in config and config["sliding_window"] is None:
        return every_window(config, num_layers)
    window, every = positive(config, "sliding_window", DEFAULT_WINDOW), 1
    if config.get("layer_types") is None:
        every = positive(config, "sliding_window_pattern", 4)
    return mixed_windows(config, num_layers, window, every=every)


family = Exaone4Family()
