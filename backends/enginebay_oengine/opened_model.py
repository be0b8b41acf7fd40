"""OpenedModel: a model with its weights, its configuration and the parts that steps are made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from enginebay.compose.composition import Plan, make_parts, make_plan
from enginebay.config import EngineConfig, make_config
from enginebay.errors import ConfigError, UnsupportedError, explain
from enginebay.llm import LLM
from enginebay.model import Weights
from enginebay.runner.parts import EngineParts
from enginebay_oengine.engine import PagedEngine

ENGINE = "oengine"

QUANTIZATION = "kv_cache_quantization_method"
"""The field of a model's configuration that asks for a quantised cache."""

ModelLike = LLM | EngineConfig | Mapping[str, Any] | str | Path


@dataclasses.dataclass(frozen=True)
class GenerationConfig:
    """What a model says about the end of its sequences: one token id, several, or nothing."""

    eos_token_id: int | list[int] | None = None


@dataclasses.dataclass(frozen=True)
class OpenedModel:
    """A model as oEngine takes it. Several engines and caches can be made of one; they share its
    weights.
    """

    plan: Plan
    parts: EngineParts
    weights: Weights
    generation_config: GenerationConfig

    def split_module(self) -> tuple[EngineParts, Weights, Weights]:
        """(graphdef, graphstate, graphothers): what is traced, the weights by dotted path, and what
        else there is: nothing.
        """
        return self.parts, self.weights, {}

    def check_cache(self) -> None:
        """UnsupportedError when the model's configuration asks for a quantised cache."""
        method = self.plan.checkpoint.config.get(QUANTIZATION)
        if method is not None and str(method).lower() != "none":
            raise UnsupportedError(
                explain(
                    f"{QUANTIZATION} = {method!r} in the model's configuration",
                    "none: keys and values are kept in the model's dtype",
                    "Take it out of config.json.",
                )
            )


def open_model(model: ModelLike) -> OpenedModel:
    """The OpenedModel of a folder, hub id or "demo", of a configuration (or a mapping of its
    fields), or of an LLM.

    An LLM must have the engine "oengine", and its weights are shared. ConfigError for another
    engine.
    """
    if isinstance(model, LLM):
        if not isinstance(model.engine, PagedEngine):
            raise ConfigError(
                explain(
                    f"an LLM with engine {model.config.engine.name!r}",
                    f"engine {ENGINE!r}",
                    "Make the LLM with it.",
                )
            )
        return _opened(model.plan, model.engine.parts, model.engine.runner.weights)
    if isinstance(model, EngineConfig):
        config = model
    elif isinstance(model, Mapping):
        config = make_config({"engine": ENGINE}, model)
    else:
        config = make_config({"engine": ENGINE, "model": str(model)})
    if config.engine.name == "auto":
        config = make_config(config.model_dump(), {"engine": ENGINE})
    if config.engine.name != ENGINE:
        raise ConfigError(
            explain(
                f"engine = {config.engine.name!r}",
                ENGINE,
                "Leave the engine out, or name this one.",
            )
        )
    plan = make_plan(config)
    parts = make_parts(plan)
    return _opened(plan, parts, parts.load_weights())


def _opened(plan: Plan, parts: EngineParts, weights: Weights) -> OpenedModel:
    ends = list(plan.checkpoint.token_info.eos_token_ids)
    return OpenedModel(plan, parts, weights, GenerationConfig(ends or None))
