"""What an inference stands on: a model, its contiguous engine, its tokenizer and its special
tokens.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from enginebay.compose.composition import Plan, make_engine, make_plan
from enginebay.config import EngineConfig, make_config
from enginebay.errors import ConfigError, InputError, explain
from enginebay.llm import LLM
from enginebay.model import Weights, count_weights
from enginebay.text import Tokenizer
from enginebay_vinference.engine import VInferenceEngine
from enginebay_vinference.errors import MissingSettingError
from enginebay_vinference.inference_config import vInferenceConfig
from enginebay_vinference.partition import PartitionAxis

ENGINE = "vinference"

LENGTH_NAMES = (
    "max_position_embeddings",
    "max_position_embedding",
    "max_sequence_length",
    "n_positions",
    "n_ctx",
    "seq_length",
)
"""What model configurations call the longest sequence; the first is the name of most."""

ModelLike = LLM | EngineConfig | Mapping[str, Any] | str | Path


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A plan and its engine, whose weights are loaded."""

    plan: Plan
    engine: VInferenceEngine

    @property
    def weights(self) -> Weights:
        """The engine's weights by dotted path."""
        return self.engine.runner.weights

    def default_name(self) -> str:
        """{model type}-{billions of parameters}B-{date}."""
        kind = self.plan.checkpoint.config.get("model_type", self.plan.model.info.family)
        today = dt.datetime.now(dt.UTC)
        return f"{kind}-{count_weights(self.plan.model) / 1e9:.2f}B-{today:%Y%m%d}"

    def longest_sequence(self) -> int:
        """Tokens that the model and its configuration here allow. ValueError when the model names
        no limit.
        """
        limit = longest_sequence(self.plan.checkpoint.config)
        own = self.plan.config.max_model_len
        return limit if own is None else min(limit, own)


def longest_sequence(config: Mapping[str, Any]) -> int:
    """The longest sequence that a model's configuration names. ValueError when it names none."""
    for name in LENGTH_NAMES:
        value = config.get(name)
        if isinstance(value, int):
            return value
    raise InputError(
        explain(
            "a model configuration without a longest sequence",
            f"one of {', '.join(LENGTH_NAMES)}",
            "Add it.",
        )
    )


def open_subject(model: ModelLike) -> LoadedModel:
    """The subject of a folder, hub id or "demo", of a configuration, or of an LLM, whose weights it
    shares.

    ConfigError when a configuration or an LLM has another engine than the contiguous one.
    """
    if isinstance(model, LLM):
        if not isinstance(model.engine, VInferenceEngine):
            raise ConfigError(
                explain(
                    f"an LLM with engine {model.config.engine.name!r}",
                    f"engine {ENGINE!r}",
                    "Make the LLM with it.",
                )
            )
        return LoadedModel(model.plan, model.engine)
    if isinstance(model, EngineConfig):
        config = model
    elif isinstance(model, Mapping):
        config = make_config({"engine": ENGINE}, model)
    else:
        config = make_config({"engine": ENGINE, "model": str(model)})
    if config.engine.name == "auto":
        config = make_config(config.model_dump(), {"engine": ENGINE})
    plan = make_plan(config)
    engine = make_engine(plan)
    if not isinstance(engine, VInferenceEngine):
        raise ConfigError(
            explain(
                f"engine = {plan.config.engine.name!r}",
                ENGINE,
                "Leave the engine out, or name this one.",
            )
        )
    engine.make_arrays()
    return LoadedModel(plan, engine)


def find_tokenizer(processor: Any, plan: Plan) -> Tokenizer:
    """The Tokenizer of a tokenizer, of a processor that has one, or of the model's own folder when
    it is None.

    ValueError when it is none of these.
    """
    if processor is None:
        loaded: Tokenizer = plan.checkpoint.load_tokenizer()
        loaded.limit_templates(plan.config.template_limits)
        return loaded
    inner = getattr(processor, "tokenizer", processor)
    if isinstance(inner, Tokenizer):
        return inner
    if all(callable(getattr(inner, name, None)) for name in ("encode", "decode")):
        made = Tokenizer(inner)
        made.limit_templates(plan.config.template_limits)
        return made
    raise InputError(
        explain(
            f"a processor of type {type(processor).__name__}",
            "a tokenizer of transformers, a processor with one, or None for the model's own",
            "Give one of these.",
        )
    )


def complete_config(config: vInferenceConfig, plan: Plan, tokenizer: Tokenizer) -> vInferenceConfig:
    """The configuration with special tokens filled in: its own, else the model's, else the
    tokenizer's.

    AssertionError when nobody names a pad or an end-of-sequence token.
    """
    if not isinstance(config, vInferenceConfig):
        given = f"a generation_config of type {type(config).__name__}"
        raise ConfigError(
            explain(given, "a vInferenceConfig, or None", "Make one with vInferenceConfig(...).")
        )
    known, inner = plan.checkpoint.token_info, tokenizer.inner
    eos = config.eos_token_id
    if eos is None and known.eos_token_ids:
        eos = list(known.eos_token_ids)
    found = {
        "eos_token_id": eos,
        "pad_token_id": config.pad_token_id
        if config.pad_token_id is not None
        else known.pad_token_id,
        "bos_token_id": config.bos_token_id
        if config.bos_token_id is not None
        else known.bos_token_id,
    }
    found = {
        name: getattr(inner, name, None) if value is None else value
        for name, value in found.items()
    }
    for name in ("pad_token_id", "eos_token_id"):
        if found[name] is None:
            raise MissingSettingError(
                explain(
                    f"{name}, which neither the configuration nor the model nor the tokenizer "
                    "names",
                    "a token id",
                    f"Give vInferenceConfig({name}=...).",
                )
            )
    if config.partition_rules is None and config.partition_axis is None:
        return config.replace(**found, partition_axis=PartitionAxis())
    return config.replace(**found)
