"""The model of an inference: its plan, its contiguous engine and its special tokens."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Mapping
from typing import Any, cast

from enginebay.compose.composition import make_engine, make_plan
from enginebay.compose.plan import Plan
from enginebay.contracts.model import Weights
from enginebay.contracts.text import Tokenizer
from enginebay.errors import ConfigError, InputError
from enginebay.serving import LLM
from enginebay_contiguous.engine import ContiguousEngine, is_contiguous
from enginebay_shared.opening import (
    OF_LLM,
    ModelLike,
    config_of,
    refuse_parts_of_llm,
    refuse_states,
    size_name,
    wrong_llm,
)
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
"""Names of the max sequence length in model configurations; the first is the most common."""


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A plan and its engine with loaded weights."""

    plan: Plan
    engine: ContiguousEngine
    llm: LLM | None = None
    """The LLM that was given, which has the engine and a loop."""

    @property
    def weights(self) -> Weights:
        """The engine's weights by dotted path."""
        return self.engine.executor.weights()

    def default_name(self) -> str:
        """Return "{model type}-{billions of parameters}B-{date}"."""
        return f"{size_name(self.plan)}B-{dt.datetime.now(dt.UTC):%Y%m%d}"

    def longest_sequence(self) -> int:
        """Return the max sequence length of the model and the configuration, in tokens. ValueError
        when the model has no limit.
        """
        limit = longest_sequence(self.plan.checkpoint.config)
        own = self.plan.config.max_model_len
        return limit if own is None else min(limit, own)


def longest_sequence(config: Mapping[str, Any]) -> int:
    """Return the max sequence length in a model's configuration. ValueError when it has none."""
    for name in LENGTH_NAMES:
        value = config.get(name)
        if isinstance(value, int):
            return value
    raise InputError(
        "a model configuration without a max sequence length",
        f"one of {', '.join(LENGTH_NAMES)}",
        "Add max_position_embeddings to the model's config.json.",
    )


def make_loaded_model(model: ModelLike) -> LoadedModel:
    """Load the model of a folder, a hub id, "demo" or a configuration, or use the engine of an LLM
    and its weights.

    ConfigError for another engine than the contiguous one, and for a setting that vInference, which
    runs its steps itself, would not use, such as a scheduler or an executor by name.
    """
    if isinstance(model, LLM):
        if not is_contiguous(model.engine):
            raise wrong_llm(model, ENGINE)
        refuse_parts_of_llm(model.config, "vInference", ENGINE, OF_LLM)
        refuse_states(model.plan, "vInference")
        return LoadedModel(model.plan, model.engine, model)
    config = config_of(model, ENGINE)
    refuse_parts_of_llm(config, "vInference", ENGINE, {"generation_config"})
    plan = make_plan(config)
    refuse_states(plan, "vInference")
    engine = make_engine(plan)
    engine.make_arrays()
    return LoadedModel(plan, cast("ContiguousEngine", engine))


def complete_config(config: vInferenceConfig, plan: Plan, tokenizer: Tokenizer) -> vInferenceConfig:
    """Return the configuration with special tokens filled in from the model, or else from the
    tokenizer.

    AssertionError when the pad or the end-of-sequence token is set nowhere.
    """
    if not isinstance(config, vInferenceConfig):
        given = f"a generation_config of type {type(config).__name__}"
        raise ConfigError(
            given, "a vInferenceConfig, or None", "Make one with vInferenceConfig(...)."
        )
    known = plan.checkpoint.token_info
    of_model = {
        "eos_token_id": list(known.eos_token_ids) or None,
        "pad_token_id": known.pad_token_id,
        "bos_token_id": known.bos_token_id,
    }
    found = {}
    for name, own in of_model.items():
        named = (getattr(config, name), own, getattr(tokenizer.inner, name, None))
        found[name] = next((value for value in named if value is not None), None)
    for name in ("pad_token_id", "eos_token_id"):
        if found[name] is None:
            raise MissingSettingError(
                f"no {name} in the configuration, the model and the tokenizer",
                "a token id",
                f"Pass vInferenceConfig({name}=...).",
            )
    if config.partition_rules is None and config.partition_axis is None:
        return config.replace(**found, partition_axis=PartitionAxis())
    return config.replace(**found)
