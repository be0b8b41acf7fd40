"""Reads the fields of config.json that families share. Fields that are not supported are refused by
name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from enginebay.errors import ConfigError, explain
from enginebay.ops.rotary import RopeSpec
from enginebay_models.activations import ACTIVATIONS
from enginebay_models.fields import bad_field, flag, number, positive
from enginebay_models.rope_config import check_spec, read_rope

FULL, SLIDING = "full_attention", "sliding_attention"
MAX_LAYERS = 1000
MAX_HEAD_DIM = 2**16
"""Larger sizes of heads are refused before arrays of that size are made."""
"""Largest number of layers. A layer is a Python object, so a larger number is refused before any
layer is made.
"""
DEFAULT_WINDOW = 4096
"""The sliding window of families with windows whose config.json has no number."""


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """The fields that all families share, checked; ModelInfo describes `auto_max_model_len`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    tied: bool
    activation: str
    rope: RopeSpec
    max_model_len: int
    auto_max_model_len: int


def read_decoder(
    config: Mapping[str, Any],
    *,
    head_dim: int | None = None,
    kv_heads: int | None = None,
    max_model_len: int | None = None,
    eps: tuple[str, float] = ("rms_norm_eps", 1e-6),
    partial: bool = False,
) -> DecoderConfig:
    """Read the shared fields, with rotary positions for rows of `max_model_len` tokens.

    `max_model_len` None is auto_max_model_len. `head_dim` and `kv_heads` are the family's defaults;
    None means hidden_size / num_attention_heads, and num_attention_heads. `eps` is the field of the
    norms, and its default. With `partial` the plain rotary rule has a partial_rotary_factor too.
    CheckpointError names a wrong field.
    """
    refuse_unserved_features(config)
    hidden, heads = positive(config, "hidden_size"), positive(config, "num_attention_heads")
    num_kv_heads = _kv_heads(config, heads, kv_heads or heads)
    silent = config.get("head_dim") is None and head_dim is None
    width = max(1, hidden // heads) if silent else positive(config, "head_dim", head_dim)
    if width % 2 or width > MAX_HEAD_DIM:
        raise bad_field("head_dim", width, f"an even number of at most {MAX_HEAD_DIM}")
    rules = read_rope(config)
    rope = rules.spec(width, max_model_len, partial=partial)
    check_spec(rope)
    return DecoderConfig(
        vocab_size=positive(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=positive(config, "intermediate_size"),
        num_layers=positive(config, "num_hidden_layers", most=MAX_LAYERS),
        num_q_heads=heads,
        num_kv_heads=num_kv_heads,
        head_dim=width,
        norm_eps=number(config, *eps),
        tied=flag(config, "tie_word_embeddings", default=False),
        activation=config.get("hidden_act", "silu"),
        rope=rope,
        max_model_len=rules.max_model_len,
        auto_max_model_len=rules.auto_max_model_len,
    )


def _kv_heads(config: Mapping[str, Any], heads: int, silent: int) -> int:
    """Read num_key_value_heads: `silent` if the field is absent, all heads if it is null."""
    found = config.get("num_key_value_heads", silent)
    count = (
        heads if found is None else positive({"num_key_value_heads": found}, "num_key_value_heads")
    )
    if heads % count:
        named = (
            "num_key_value_heads"
            if "num_key_value_heads" in config
            else "num_key_value_heads by default"
        )
        raise bad_field(named, count, f"a divisor of num_attention_heads = {heads}")
    return count


def refuse_unserved_features(config: Mapping[str, Any]) -> None:
    """Raise CheckpointError for features that change the result and are not implemented."""
    activation(config, "hidden_act", "silu")


def activation(config: Mapping[str, Any], name: str, default: str) -> str:
    """Read the name of an activation; `default` if the field is absent."""
    value = config.get(name, default)
    if not isinstance(value, str) or value not in ACTIVATIONS:
        raise bad_field(name, value, ", ".join(sorted(ACTIVATIONS)), is_null=name in config)
    return value


def check_heads(
    hidden_name: str, hidden: int, heads_name: str, heads: int, *, num_shards: int
) -> None:
    """Raise CheckpointError when heads do not divide the hidden size, and ConfigError when shards
    do not divide the heads. The names are those of the two fields.
    """
    if hidden % heads:
        raise bad_field(hidden_name, hidden, f"a multiple of {heads_name} = {heads}")
    if heads % num_shards:
        given, allowed = f"{num_shards} shards for {heads} heads", f"a divisor of {heads}"
        todo = "Change the mesh, or map kv_heads to another axis."
        raise ConfigError(explain(given, allowed, todo))


def with_equal_heads(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a family whose heads divide the hidden size: such a family has no
    field head_dim. CheckpointError when they do not.
    """
    hidden, heads = positive(config, "hidden_size"), positive(config, "num_attention_heads")
    if hidden % heads:
        raise bad_field("hidden_size", hidden, f"a multiple of num_attention_heads = {heads}")
    return dict(config) | {"head_dim": None}


def every_window(config: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Return the window sliding_window of all layers; None, full attention, where it is absent or
    null.
    """
    off = config.get("sliding_window") is None
    check_layer_types(config, num_layers, (FULL if off else SLIDING,))
    return (None if off else positive(config, "sliding_window"),) * num_layers


def mixed_windows(
    config: Mapping[str, Any], num_layers: int, window: int, *, every: int
) -> tuple[int | None, ...]:
    """Return the window of each layer, None for full attention: as layer_types says, or full in
    each `every`-th layer.
    """
    kinds = check_layer_types(config, num_layers, (FULL, SLIDING))
    if not kinds:
        kinds = [SLIDING if (i + 1) % every else FULL for i in range(num_layers)]
    return tuple(window if kind == SLIDING else None for kind in kinds)


def layer_windows(config: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Return the window of each layer by the rules of Qwen2 and Qwen3; None is full attention."""
    window = None
    if (
        flag(config, "use_sliding_window", default=False)
        and config.get("sliding_window", 0) is not None
    ):
        window = positive(config, "sliding_window", DEFAULT_WINDOW)
    if config.get("layer_types") is None:
        first = config.get("max_window_layers", 28)
        if not isinstance(first, int) or isinstance(first, bool) or first < 0:
            is_null = "max_window_layers" in config
            raise bad_field("max_window_layers", first, "a whole number of layers", is_null=is_null)
        return tuple(None if i < first else window for i in range(num_layers))
    kinds = check_layer_types(config, num_layers, (FULL, SLIDING))
    if window is None and SLIDING in kinds:
        allowed = f"{FULL} alone where use_sliding_window is false or sliding_window is null"
        raise bad_field("layer_types", kinds, allowed)
    return tuple(window if kind == SLIDING else None for kind in kinds)


def later_layers(config: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    """Return ModelInfo.unused_tensors of a family whose checkpoints have num_nextn_predict_layers
    more layers, 1 if the field is absent, which predict later tokens (MTP).
    """
    name = "num_nextn_predict_layers"
    last = num_layers
    if config.get(name) != 0:
        last += positive(config, name, 1, most=MAX_LAYERS)
    return tuple(f"model.layers.{layer}." for layer in range(num_layers, last))


def check_layer_types(
    config: Mapping[str, Any], num_layers: int, allowed: tuple[str, ...]
) -> list[str]:
    """Read layer_types; an empty list if it is absent or null.

    CheckpointError for a kind that is not in `allowed`.
    """
    kinds = config.get("layer_types")
    if kinds is None:
        return []
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or any(kind not in allowed for kind in kinds)
    ):
        raise bad_field("layer_types", kinds, f"{num_layers} of {' or '.join(allowed)}")
    return kinds
