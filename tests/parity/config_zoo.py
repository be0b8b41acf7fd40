"""Generated config.json files of every family, and what transformers and enginebay derive from
them.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import json
import random
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.contracts.model import Model
from enginebay.errors import CheckpointError
from enginebay.ops.batches import derive_batch
from enginebay.ops.rotary import rope_frequencies
from enginebay.ops.spec import Bucket
from enginebay_models.activations import ACTIVATIONS, Activation
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.hf_config import DecoderConfig
from enginebay_testing.model_harness import ModelHarness, place_over, random_weights
from tests.parity.ops import plain_ops

NUM_CONFIGS, NUM_LOGITS = 500, 60
CONTEXT = 48
LONG = 80  # configurations are served at the lengths CONTEXT and LONG
FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_FIXED = {"vocab_size": 64, "intermediate_size": 40, "num_hidden_layers": 2, "rms_norm_eps": 1e-5}
_NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_MIXED = ["full_attention", "sliding_attention"]

# The fields that each value of an axis sets. Most values are served; of those that are not, "!"
# begins the name.
AXES: dict[str, dict[str, dict[str, Any]]] = {
    "heads": {
        "4 of 2": {"num_attention_heads": 4, "num_key_value_heads": 2},
        "4 of 1": {"num_attention_heads": 4, "num_key_value_heads": 1},
        "4 of null": {"num_attention_heads": 4, "num_key_value_heads": None},
        "32 of silence": {"num_attention_heads": 32, "head_dim": 8},
        "!4 of silence": {"num_attention_heads": 4},
        "!4 of 3": {"num_attention_heads": 4, "num_key_value_heads": 3},
    },
    "width": {
        "32": {"hidden_size": 32, "head_dim": 8},
        "64 in wide heads": {"hidden_size": 64, "head_dim": 24},
        "64, heads by division": {"hidden_size": 64},
        "!heads of null": {"hidden_size": 64, "head_dim": None},
        "!heads of 7": {"hidden_size": 32, "head_dim": 7},
        "!36": {"hidden_size": 38, "head_dim": 8},
    },
    "activation": {
        "silence": {},
        "silu": {"hidden_act": "silu"},
        "swish": {"hidden_act": "swish"},
        "gelu": {"hidden_act": "gelu"},
        "gelu_new": {"hidden_act": "gelu_new"},
        "gelu_pytorch_tanh": {"hidden_act": "gelu_pytorch_tanh"},
        "relu": {"hidden_act": "relu"},
        "!quick_gelu": {"hidden_act": "quick_gelu"},
        "!unknown": {"hidden_act": "gelou"},
        "!null": {"hidden_act": None},
    },
    "tying": {
        "silence": {},
        "tied": {"tie_word_embeddings": True},
        "untied": {"tie_word_embeddings": False},
        "!null": {"tie_word_embeddings": None},
    },
    "biases": {
        "silence": {},
        "attention": {"attention_bias": True, "mlp_bias": False},
        "both": {"attention_bias": True, "mlp_bias": True},
        "!null": {"attention_bias": None, "mlp_bias": None},
    },
    "windows": {
        "silence": {},
        "none": {"use_sliding_window": False, "sliding_window": None},
        "null": {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
        "all": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
        "upper": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        "by default": {"use_sliding_window": True, "max_window_layers": 1},
        "by kinds": {"use_sliding_window": True, "sliding_window": 8, "layer_types": _MIXED},
        "!off by kinds": {"use_sliding_window": False, "sliding_window": 8, "layer_types": _MIXED},
        "!too few kinds": {"layer_types": ["full_attention"]},
        "!null layers": {
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": None,
        },
        "!nought": {"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 0},
    },
    "partial": {
        "silence": {},
        "whole": {"partial_rotary_factor": 1.0},
        "half": {"partial_rotary_factor": 0.5},
        "null": {"partial_rotary_factor": None},
        "!a third": {"partial_rotary_factor": 0.3},
        "!nothing": {"partial_rotary_factor": 0.0},
    },
}
POINTS = np.linspace(-6, 6, 13, dtype=np.float32)
_DIVISORS = ("short_factor", "long_factor")
RULES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "llama3": {"rope_type": "llama3", **_LLAMA3, "original_max_position_embeddings": 16},
    "yarn": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 24},
    "yarn with all": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 24,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
        "mscale": 0.7,
        "mscale_all_dim": 0.9,
    },
    "yarn, scaled": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3, "mscale": 0.7},
    "yarn of null": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 24},
    "longrope": {"rope_type": "longrope", "original_max_position_embeddings": 60},
    "longrope with all": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 24,
        "factor": 4.0,
        "attention_factor": 1.2,
    },
    "proportional": {"rope_type": "proportional"},
    "proportional by factor": {
        "rope_type": "proportional",
        "factor": 2.0,
        "partial_rotary_factor": 0.25,
    },
    "!su": {"rope_type": "su", "factor": 2.0},
    "!linear of nothing": {"rope_type": "linear"},
    "!linear of text": {"rope_type": "linear", "factor": "2"},
    "!yarn of null": {"rope_type": "yarn", "factor": 2.0, "truncate": None},
    "!llama3 of less": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0},
    "!of kinds": {"full_attention": {"rope_type": "default"}},
}
PLACES = ("parameters", "scaling", "type", "both", "!contradiction", "none")
THETAS = ("silence", "beside", "inside", "both", "!null")
ORIGINALS = ("as it is", "beside", "beside and inside", "!null beside")


@dataclasses.dataclass(frozen=True)
class Generated:
    """A configuration, the length that it is served at, and the value of each axis."""

    family: str
    config: Mapping[str, Any]
    max_model_len: int
    traits: Mapping[str, str]

    @property
    def text(self) -> str:
        """The configuration in one line, for messages."""
        return f"{self.family} at {self.max_model_len}: {json.dumps(dict(self.config))}"


def generate(index: int) -> Generated:
    """Configuration `index`, the same whenever it is made; two thirds have served values alone."""
    rng = random.Random(index)
    family = list(FAMILIES)[index % len(FAMILIES)]
    faults = rng.random() < 1 / 3

    def choose(names: Any) -> str:
        served = [name for name in names if not name.startswith("!")]
        return rng.choice(list(names) if faults and rng.random() < 0.3 else served)

    traits = {axis: choose(values) for axis, values in AXES.items()}
    traits |= {"rule": choose(RULES), "place": choose(PLACES), "theta": choose(THETAS)}
    traits |= {"original": choose(ORIGINALS), "length": rng.choice(["context", "long"])}
    config = {"model_type": family, "architectures": [FAMILIES[family]], **_FIXED, **_NO_TOKENS}
    config |= {"max_position_embeddings": CONTEXT}
    for axis, value in traits.items():
        config |= AXES.get(axis, {}).get(value, {})
    config |= _rope_fields(config, traits)
    return Generated(family, config, LONG if traits["length"] == "long" else CONTEXT, traits)


def _rope_fields(config: Mapping[str, Any], traits: Mapping[str, str]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    rules = dict(RULES[traits["rule"]])
    original = "original_max_position_embeddings"
    if traits["original"].startswith("beside"):
        fields[original] = 20
        if traits["original"] == "beside":
            rules.pop(original, None)
    elif traits["original"] == "!null beside":
        fields[original] = None
    if rules.get("rope_type") == "longrope":
        width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        pairs = int(width * (config.get("partial_rotary_factor") or 1.0)) // 2
        short = [1.0 + 0.1 * i for i in range(pairs)]
        rules |= dict(zip(_DIVISORS, (short, [2.0 + i for i in range(pairs)]), strict=True))
    if traits["theta"] in ("beside", "both"):
        fields["rope_theta"] = 5000.0
    if traits["theta"] in ("inside", "both"):
        rules["rope_theta"] = 1e6
    if traits["theta"] == "!null":
        fields["rope_theta"] = None
    place = traits["place"]
    if place == "none":
        return fields
    if place in ("scaling", "type", "both", "!contradiction"):
        fields["rope_scaling"] = dict(rules)
        if place == "type" and "rope_type" in rules:
            fields["rope_scaling"]["type"] = fields["rope_scaling"].pop("rope_type")
    if place in ("parameters", "both", "!contradiction"):
        fields["rope_parameters"] = dict(rules)
    if place == "!contradiction":
        fields["rope_scaling"] |= {"rope_type": "linear", "factor": 7.0}
    return fields


@dataclasses.dataclass(frozen=True)
class Derived:
    """What a configuration comes to. `activation` is the function's values at POINTS."""

    inverse_frequencies: np.ndarray
    attention_factor: float
    head_dim: int
    num_kv_heads: int
    windows: tuple[int | None, ...]
    activation: np.ndarray
    tied: bool

    def as_json(self) -> dict[str, Any]:
        """The fields as JSON holds them; numbers have the nine digits that tell f32 values
        apart.
        """
        fields = dataclasses.asdict(self)
        for name in ("inverse_frequencies", "activation"):
            fields[name] = [float(f"{value:.9g}") for value in fields[name]]
        return fields

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> Derived:
        """The inverse of as_json."""
        arrays = {name: np.array(fields[name]) for name in ("inverse_frequencies", "activation")}
        return Derived(**{**fields, **arrays, "windows": tuple(fields["windows"])})

    def difference(self, other: Derived) -> str | None:
        """The first field that differs, None where all are equal. Frequencies of transformers are
        f32 throughout.
        """
        for name in ("head_dim", "num_kv_heads", "windows", "tied"):
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                return f"{name}: {ours} and {theirs}"
        for name, rtol, atol in (
            ("inverse_frequencies", 5e-6, 0.0),
            ("attention_factor", 1e-6, 0.0),
            ("activation", 1e-6, 1e-6),
        ):
            ours, theirs = np.asarray(getattr(self, name)), np.asarray(getattr(other, name))
            if ours.shape != theirs.shape or not np.allclose(ours, theirs, rtol=rtol, atol=atol):
                return f"{name}: {ours} and {theirs}"
        return None


def build(one: Generated) -> tuple[Model, DecoderConfig, Variant]:
    """enginebay's model of a configuration, and what its family read. CheckpointError as the family
    raises it.
    """
    module = importlib.import_module(f"enginebay_models.{one.family}")
    seen: list[tuple[DecoderConfig, Variant]] = []

    def keep(name: str, config: DecoderConfig, variant: Variant, **sizes: Any) -> Model:
        seen.append((config, variant))
        return build_decoder(name, config, variant, **sizes)

    module.build_decoder = keep
    try:
        model = module.family.build(one.config, dtype="float32", max_model_len=one.max_model_len)
    finally:
        module.build_decoder = build_decoder
    return model, *seen[0]


def ours(one: Generated) -> Derived | str:
    """What enginebay derives, or its refusal."""
    try:
        _, config, variant = build(one)
    except CheckpointError as error:
        return str(error)
    frequencies, factor = rope_frequencies(config.rope)
    activation = _activation_values(ACTIVATIONS[config.activation])
    return Derived(
        frequencies,
        float(factor),
        config.head_dim,
        config.num_kv_heads,
        variant.windows,
        activation,
        config.tied,
    )


@functools.cache
def _activation_values(function: Activation) -> np.ndarray:
    return np.asarray(jax.jit(function)(POINTS))


def turns_a_part(one: Generated) -> bool:
    """Whether the rule turns a part of each head: these families of transformers have no such
    forward.
    """
    rules = one.config.get("rope_scaling") or one.config.get("rope_parameters") or {}
    kind = rules.get("rope_type", rules.get("type", "default"))
    partial = rules.get("partial_rotary_factor", one.config.get("partial_rotary_factor"))
    return kind not in ("default", "proportional") and partial not in (None, 1.0)


def logits(one: Generated, token_ids: list[int]) -> np.ndarray:
    """Logits f32 [tokens, vocab] of random weights, operation by operation: no program is compiled
    for one run.
    """
    model, _, _ = build(one)
    placement, length = place_over(1), one.max_model_len
    weights = random_weights(model, placement, dtype="float32")
    harness = ModelHarness(model, weights, plain_ops, placement, num_rows=1, capacity=length)
    bucket = Bucket(length, 1, 1, length, length, "prefill")
    batch = derive_batch(
        jnp.array([length]), jnp.array([length]), jnp.zeros((1, 1), int), length, bucket
    )
    ops = plain_ops(model.info, placement)(bucket, harness.layouts)
    batches = dict.fromkeys(harness.layouts, batch)
    hidden, _ = model.hidden(weights, ops, jnp.array(token_ids), harness.cache, batches)
    return np.asarray(model.logits(weights, ops, hidden))


def traits_of(one: Generated) -> dict[str, object] | None:
    """What the logits of a configuration depend on, None where transformers has none to compare
    with.
    """
    if isinstance(ours(one), str) or turns_a_part(one):
        return None
    _, config, variant = build(one)
    windows = [window is not None for window in variant.windows]
    rule = (
        "plain"
        if one.traits["place"] == "none"
        else one.traits["rule"].partition(" ")[0].rstrip(",")
    )
    return {
        "family": one.family,
        "rule": rule,
        "long": one.max_model_len > CONTEXT,
        "activation": {"swish": "silu", "gelu_new": "gelu_tanh"}.get(
            config.activation, config.activation
        ),
        "windows": (any(windows), all(windows)),
        "heads": (config.num_q_heads, config.num_kv_heads),
        "head_dim": config.head_dim,
        "tied": config.tied,
        "biases": (variant.qkv_bias, variant.out_bias, variant.mlp_bias),
    }


def chosen_for_logits() -> list[int]:
    """NUM_LOGITS configurations that have, among them, each pair of traits that any configuration
    has.
    """
    traits = {
        str(index): found
        for index in range(NUM_CONFIGS)
        if (found := traits_of(generate(index))) is not None
    }
    chosen = _covering(traits)
    others = [name for name in traits if name not in chosen]
    return sorted(int(name) for name in [*chosen, *others[: NUM_LOGITS - len(chosen)]])


def _covering(traits: Mapping[str, Mapping[str, object]]) -> set[str]:
    """Names such that each pair of traits of any name is one of theirs: the name with the most
    missing pairs, repeatedly.
    """
    pairs = {name: set(itertools.combinations(found.items(), 2)) for name, found in traits.items()}
    left = set().union(*pairs.values())
    chosen: set[str] = set()
    while left:
        best = max(pairs, key=lambda name: len(pairs[name] & left))
        chosen.add(best)
        left -= pairs.pop(best)
    return chosen
