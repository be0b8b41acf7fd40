"""The OLMo 3 family: OLMo 2 with a window in three layers of four."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.contracts.model import Model, ModelFamily
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.fields import bad_field, flag, positive
from enginebay_models.hf_config import DEFAULT_WINDOW, FULL, SLIDING, mixed_windows, read_decoder
from enginebay_models.rope_config import check_spec, read_rope

_THETA = 500000.0
_DEFAULTS: dict[str, Any] = {"max_position_embeddings": 2048, "rope_theta": _THETA}


class Olmo3Family(ModelFamily):
    """As `olmo2`, with a window in three layers of four, or as `layer_types` says.

    A scaled rotary rule is for the other layers alone.
    """

    name = "olmo3"
    architectures = ("Olmo3ForCausalLM",)

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        shared = _DEFAULTS | dict(config)
        decoder = read_decoder(
            _with_rope(shared, FULL), max_model_len=max_model_len, eps=("rms_norm_eps", 1e-5)
        )
        window_rope = read_rope(_with_rope(shared, SLIDING)).spec(decoder.head_dim, max_model_len)
        check_spec(window_rope)
        bias = flag(config, "attention_bias", default=False)
        window = positive(config, "sliding_window", DEFAULT_WINDOW)
        variant = Variant(
            windows=mixed_windows(config, decoder.num_layers, window, every=4),
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=True,
            qk_norm_joint=True,
            window_rope=window_rope,
            in_norms=False,
            out_norms=True,
        )
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


def _with_rope(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the configuration with the rotary fields of one kind of layer only.

    The rules are those of transformers. `rope_parameters` has one entry per kind. In the older
    form, `rope_scaling` and `rope_theta` are for full layers, and the others have the default.
    """
    fields = dict(config)
    nested = fields.pop("rope_parameters", None)
    if kind == SLIDING:
        fields.pop("rope_scaling", None)
        fields["rope_theta"] = _THETA
    if nested is not None:
        allowed = f"an object by {FULL} and {SLIDING}"
        if not isinstance(nested, Mapping) or nested.keys() - {FULL, SLIDING}:
            raise bad_field("rope_parameters", nested, allowed)
        fields["rope_parameters"] = nested.get(kind)
    return fields


family = Olmo3Family()
