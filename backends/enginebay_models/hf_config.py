"""What config.json of a Hugging Face checkpoint says, read field by field; what is not served is refused by name."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, TypeGuard

from enginebay.errors import CheckpointError, explain, shown
from enginebay.ops.spec import RopeSpec

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
MAX_LAYERS = 1000
"""A layer is an object of Python: a configuration with more layers is refused before the first is made."""
MAX_SIZE = 2**31 - 1
"""Largest whole number of a field: sizes and positions are int32 on the device."""
# Llama 2's converters wrote one of these; the rule is the same.
_ACTIVATIONS = ("silu", "swish")


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """The fields that all families share, checked."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    tied: bool
    rope: RopeSpec
    max_model_len: int


def read_decoder(
    config: Mapping[str, Any], *, head_dim: int | None = None, tied: bool = False
) -> DecoderConfig:
    """The shared fields; `head_dim` and `tied` are the family's defaults. CheckpointError names what is wrong."""
    refuse_unserved(config)
    hidden, heads = positive(config, "hidden_size"), positive(config, "num_attention_heads")
    kv_heads = positive(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise bad_field("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads = {heads}")
    width = positive(config, "head_dim", head_dim or hidden // heads)
    if width % 2:
        raise bad_field("head_dim", width, "an even number")
    rope = read_rope(config, width)
    return DecoderConfig(
        vocab_size=positive(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=positive(config, "intermediate_size"),
        num_layers=positive(config, "num_hidden_layers", most=MAX_LAYERS),
        num_q_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=width,
        norm_eps=number(config, "rms_norm_eps", 1e-6),
        tied=flag(config, "tie_word_embeddings", default=tied),
        rope=rope,
        max_model_len=_max_model_len(config, rope),
    )


def refuse_unserved(config: Mapping[str, Any]) -> None:
    """CheckpointError for features that would change the result and are not implemented."""
    activation = config.get("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise bad_field("hidden_act", activation, "silu")
    if config.get("quantization_config"):
        raise bad_field(
            "quantization_config", "...", "absent: float32, bfloat16 and float16 checkpoints are read"
        )
    if config.get("partial_rotary_factor", 1.0) not in (1, None):
        raise bad_field("partial_rotary_factor", config["partial_rotary_factor"], "1.0")


def read_rope(config: Mapping[str, Any], head_dim: int) -> RopeSpec:
    """The rotary embedding, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    field = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rules = config.get(field) or {}
    if not isinstance(rules, Mapping):
        raise bad_field(field, rules, "an object with rope_type and its parameters")
    kind = rules.get("rope_type", rules.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise bad_field(f"{field}.rope_type", kind, ", ".join(ROPE_TYPES))
    if rules.get("partial_rotary_factor", 1.0) not in (1, None):
        raise bad_field(f"{field}.partial_rotary_factor", rules["partial_rotary_factor"], "1.0")
    theta = number(rules if "rope_theta" in rules else config, "rope_theta", 10000.0)
    if kind == "default":
        return RopeSpec(theta, head_dim)
    if "factor" not in rules:
        raise bad_field(f"{field}.factor", None, f"a number, which rope_type {kind!r} needs")
    context = config.get("max_position_embeddings")
    present = {name: rules[name] for name in _RULE_FIELDS[kind] if rules.get(name) is not None}
    if kind == "llama3" and (missing := [name for name in _RULE_FIELDS[kind] if name not in present]):
        raise bad_field(f"{field}.{missing[0]}", None, "a number, which rope_type 'llama3' needs")
    if kind == "yarn":
        present.setdefault("original_max_position_embeddings", context)
    for name, value in present.items():
        _check_rule(f"{field}.{name}", value)
    if kind == "llama3" and present["high_freq_factor"] <= present["low_freq_factor"]:
        allowed = f"more than low_freq_factor = {present['low_freq_factor']}"
        raise bad_field(f"{field}.high_freq_factor", present["high_freq_factor"], allowed)
    return dataclasses.replace(RopeSpec(theta, head_dim), scaling=kind, **present)


_RULE_FIELDS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "truncate",
        "mscale", "mscale_all_dim",
    ),
}  # fmt: skip


def _check_rule(path: str, value: object) -> None:
    """CheckpointError for a parameter of rope scaling that would end in NaN or in a wrong type."""
    name = path.rpartition(".")[2]
    if name == "truncate":
        if not isinstance(value, bool):
            raise bad_field(path, value, "true or false")
    elif not _is_number(value) or value < 0 or (value == 0 and not name.startswith("mscale")):
        raise bad_field(path, value, "a positive number")


def _is_number(value: object) -> TypeGuard[int | float]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float holds
        return False


def _max_model_len(config: Mapping[str, Any], rope: RopeSpec) -> int:
    """max_position_embeddings, or what the scaling stretches the original context to where that is longer."""
    longest = rope.original_max_position_embeddings * rope.factor if rope.scaling == "yarn" else 0
    return max(positive(config, "max_position_embeddings"), int(min(longest, MAX_SIZE)))


def layer_windows(config: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer, by the rules of Qwen2 and Qwen3 (None: attends to everything)."""
    if not flag(config, "use_sliding_window", default=False):
        return (None,) * num_layers
    window = config.get("sliding_window")
    if window is None:
        return (None,) * num_layers
    window = positive(config, "sliding_window")
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.get("max_window_layers", 28)
        if not isinstance(first, int) or isinstance(first, bool) or first < 0:
            raise bad_field("max_window_layers", first, "a whole number of layers")
        kinds = ["full_attention" if i < first else "sliding_attention" for i in range(num_layers)]
    allowed = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in allowed for kind in kinds):
        raise bad_field("layer_types", kinds, f"{num_layers} of {' or '.join(allowed)}")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def positive(
    config: Mapping[str, Any], name: str, default: int | None = None, *, most: int = MAX_SIZE
) -> int:
    """A field that must be a whole number from 1 to `most`; absent or null means the default, if there is one."""
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise bad_field(name, value, "a positive whole number")
    if value > most:
        raise bad_field(name, value, f"1 to {most}")
    return value


def number(config: Mapping[str, Any], name: str, default: float) -> float:
    """A field that must be a positive number."""
    value = config.get(name)
    value = default if value is None else value
    if not _is_number(value) or value <= 0:
        raise bad_field(name, value, "a positive number")
    return float(value)


def flag(config: Mapping[str, Any], name: str, *, default: bool) -> bool:
    """A field that must be true or false."""
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise bad_field(name, value, "true or false")
    return value


def bad_field(name: str, value: object, allowed: str) -> CheckpointError:
    """The error for a field of config.json that is missing, malformed or not served."""
    given = f"config.json has no {name}" if value is None else f"config.json has {name} = {shown(value)}"
    return CheckpointError(
        explain(given, allowed, "Correct the checkpoint's config.json, or choose another model.")
    )
