"""OpenedModel: a model with its weights, its configuration and the parts that steps are
made from.
"""

from __future__ import annotations

import dataclasses

from enginebay.compose.composition import make_parts, make_plan
from enginebay.compose.plan import Plan
from enginebay.contracts.executor import EngineParts
from enginebay.contracts.model import Weights
from enginebay.serving import LLM
from enginebay_paged.engine import is_paged
from enginebay_shared.opening import (
    OF_LLM,
    ModelLike,
    config_of,
    refuse_parts_of_llm,
    refuse_states,
    wrong_llm,
)

ENGINE = "oengine"
API_NAME = "the oEngine API"


@dataclasses.dataclass(frozen=True)
class GenerationConfig:
    """The end-of-sequence ids in a model's generation configuration: one, several or None."""

    eos_token_id: int | list[int] | None = None


@dataclasses.dataclass(frozen=True)
class OpenedModel:
    """A model for oEngine. Several engines and caches can use one OpenedModel, and share its
    weights.
    """

    plan: Plan
    parts: EngineParts
    weights: Weights
    generation_config: GenerationConfig

    def split_module(self) -> tuple[EngineParts, Weights, Weights]:
        """Return (graphdef, graphstate, graphothers): the parts to trace, the weights by dotted
        path, and an empty mapping.
        """
        return self.parts, self.weights, {}


def open_model(model: ModelLike) -> OpenedModel:
    """Open a folder, a hub id, "demo", a configuration (or a mapping of its fields), or an LLM.

    An LLM must have the engine "oengine"; its weights are shared. ConfigError for another engine,
    and for a setting that oEngine would not use, such as a scheduler or an executor by name: it
    runs its steps itself, and its scheduler is an InferenceScheduler.
    """
    if isinstance(model, LLM):
        if not is_paged(model.engine):
            raise wrong_llm(model, ENGINE)
        refuse_parts_of_llm(model.config, API_NAME, ENGINE, OF_LLM)
        return _opened(model.plan, model.engine.parts, model.engine.executor.weights())
    config = config_of(model, ENGINE)
    refuse_parts_of_llm(config, API_NAME, ENGINE)
    plan = make_plan(config)
    parts = make_parts(plan)
    return _opened(plan, parts, parts.load_weights())


def _opened(plan: Plan, parts: EngineParts, weights: Weights) -> OpenedModel:
    refuse_states(plan, API_NAME)
    ends = list(plan.checkpoint.token_info.eos_token_ids)
    return OpenedModel(plan, parts, weights, GenerationConfig(ends or None))
