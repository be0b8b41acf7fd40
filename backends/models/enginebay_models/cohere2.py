"""The Cohere 2 family (Command R7B, Command A): layers with a window have rotary positions, the
others none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.contracts.model import Model, ModelFamily
from enginebay_models.blocks import LogitRule, Residual
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.fields import flag, number, positive, refuse_others
from enginebay_models.hf_config import (
    DEFAULT_WINDOW,
    mixed_windows,
    read_decoder,
    with_equal_heads,
)
from enginebay_models.tensors import QkvRows

_DEFAULTS: dict[str, Any] = {"max_position_embeddings": 8192, "tie_word_embeddings": True}


class Cohere2Family(ModelFamily):
    """As `cohere`, with a window in the layers that `layer_types` or `sliding_window_pattern` (4 if
    absent) names.

    Layers without a window have no rotary positions.
    """

    name = "cohere2"
    architectures = ("Cohere2ForCausalLM",)

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        refuse_others(config, {"use_qk_norm": False})
        shared = with_equal_heads(_DEFAULTS | dict(config))
        decoder = read_decoder(shared, max_model_len=max_model_len, eps=("layer_norm_eps", 1e-5))
        every = positive(config, "sliding_window_pattern", 4)
        window = positive(config, "sliding_window", DEFAULT_WINDOW)
        windows = mixed_windows(config, decoder.num_layers, window, every=every)
        bias = flag(config, "attention_bias", default=False)
        variant = Variant(
            windows=windows,
            unrotated_layers=frozenset(i for i, one in enumerate(windows) if one is None),
            qkv_bias=bias,
            out_bias=bias,
            qkv_rows=QkvRows(interleaved=decoder.rope.rotary_dim),
            mlp_norm=False,
            layer_norms=True,
            residual=Residual(parallel=True),
            logits=LogitRule(scale=number(config, "logit_scale", 0.0625)),
        )
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


family = Cohere2Family()
