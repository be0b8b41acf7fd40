"""Abilities: what requests may use of an engine, and the errors for requests that use more."""

from __future__ import annotations

import dataclasses
from typing import get_args

from enginebay.compose.guides import choose_guide
from enginebay.compose.plan import Plan
from enginebay.compose.processors import ChosenProcessors
from enginebay.compose.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from enginebay.constraint import MakeGuide
from enginebay.errors import RequestError, shown
from enginebay.llm.choice import BestOf
from enginebay.llm.requested_processors import PENALTIES
from enginebay.types import ALL_LOGPROBS, MAX_LOGPROBS, ROW_VALUES, Pooling, SamplingParams


@dataclasses.dataclass(frozen=True, slots=True)
class Abilities:
    """What requests may use of an engine, from the declarations of its plugins."""

    greedy_only: bool
    returns_logprobs: bool
    processors: ChosenProcessors
    make_guide: MakeGuide
    hidden_size: int
    returns_full_vocab: bool = False
    """Whether it returns log-probabilities of prompts and of the whole vocabulary."""
    returns_hidden: bool = False
    """Whether it returns hidden states of prompts."""
    compiles_hidden: bool = True
    """Whether the programs for hidden states may be compiled: by warmup(), or later."""
    takes_embeds: bool = False
    """Whether a prompt may contain embeddings."""
    compiles_embeds: bool = True
    """Whether the programs for embeddings may be compiled: by warmup(), or later."""
    compiles_full_vocab: bool = True
    """Whether the programs for full-vocabulary log-probabilities may be compiled: by warmup(), or
    later.
    """
    defaults: SamplingDefaults = NO_DEFAULTS
    """The checkpoint's defaults for fields of SamplingParams that a request does not set."""

    @staticmethod
    def of(plan: Plan) -> Abilities:
        """The abilities of the sampler, engine and logits processors that a plan has chosen."""
        chosen = (("sampler", plan.config.sampler.name), ("engine", plan.config.engine.name))
        sampler, engine = (plan.registry.find(*each) for each in chosen)
        return Abilities(
            greedy_only=bool(sampler.capability("greedy_only")),
            returns_logprobs=bool(engine.capability("logprobs")),
            processors=plan.processors,
            make_guide=choose_guide(plan.registry, plan.config),
            returns_full_vocab=bool(engine.capability("full_vocab_logprobs")),
            hidden_size=plan.model.info.hidden_size,
            takes_embeds=bool(engine.capability("prompt_embeds")),
            compiles_embeds=plan.config.prompt_embeds or not plan.config.forbid_compiling,
            returns_hidden=bool(engine.capability("hidden_states")),
            compiles_hidden=plan.config.embeddings or not plan.config.forbid_compiling,
            compiles_full_vocab=plan.config.full_vocab_logprobs or not plan.config.forbid_compiling,
            defaults=plan.sampling_defaults,
        )


def check_penalties(params: SamplingParams, abilities: Abilities) -> None:
    """RequestError for a penalty when neither the sampler nor the logits processor `penalties`
    would apply it.
    """
    if not abilities.greedy_only or PENALTIES in abilities.processors.entries:
        return
    for name, one in ROW_VALUES.items():
        value = getattr(params, name)
        if one.stage == "penalty" and value != one.neutral:
            raise RequestError(
                f"{name} = {value} with a sampler that is greedy only, "
                f"without the logits processor {PENALTIES}",
                f"{name} = {one.neutral:g}",
                f"Pass --sampler standard, or add {PENALTIES} to the option processors.",
            )


def check_logprobs(params: SamplingParams, abilities: Abilities) -> None:
    """RequestError for log-probabilities that the engine cannot return."""
    chooses = BestOf.of(params) is not None
    if not abilities.returns_logprobs and (params.logprobs is not None or chooses):
        field, value = (
            ("best_of", params.best_of)
            if params.logprobs is None
            else ("logprobs", params.logprobs)
        )
        raise RequestError(
            f"{field} = {value} with an engine that returns no log-probabilities",
            f"{field} = None",
            f"Leave {field} out, or pass --engine oengine, which returns them.",
        )
    full_vocab = {"logprobs": params.logprobs} if params.logprobs == ALL_LOGPROBS else {}
    if params.prompt_logprobs is not None:
        full_vocab["prompt_logprobs"] = params.prompt_logprobs
    for field, value in full_vocab.items():
        if not abilities.returns_full_vocab:
            raise RequestError(
                f"{field} = {value} with an engine that returns log-probabilities neither of "
                "prompts nor of the whole vocabulary",
                f"{field} = None"
                if field == "prompt_logprobs"
                else f"logprobs = 0 to {MAX_LOGPROBS}",
                "Pass --engine oengine, which returns them.",
            )
        if not abilities.compiles_full_vocab:
            raise RequestError(
                f"{field} = {value} with forbid_compiling, but without the programs for it",
                "requests for which warmup() compiles programs",
                "Set full_vocab_logprobs = true in the configuration: warmup() compiles them too.",
            )


def check_pooling(pooling: object, abilities: Abilities) -> None:
    """RequestError for an unknown pooling, and when the engine cannot return hidden states."""
    if pooling not in get_args(Pooling):
        allowed = " or ".join(map(repr, get_args(Pooling)))
        raise RequestError(f"pooling = {shown(pooling)}", allowed, "Pass one of the two.")
    if not abilities.returns_hidden:
        raise _cannot("embed()", "hidden_states")
    if not abilities.compiles_hidden:
        raise _is_not_compiled("embed()", "embeddings")


def check_embeds(params: SamplingParams, abilities: Abilities) -> None:
    """RequestError when a prompt of this engine cannot contain embeddings."""
    if not abilities.takes_embeds:
        raise _cannot("embeddings in a prompt", "prompt_embeds")
    if not abilities.compiles_embeds:
        raise _is_not_compiled("embeddings in a prompt", "prompt_embeds")
    if params.prompt_logprobs is not None:
        raise RequestError(
            f"prompt_logprobs = {params.prompt_logprobs} with embeddings in the prompt",
            "prompt_logprobs = None: embeddings have no token ids",
            "Leave prompt_logprobs out.",
        )


def _cannot(given: str, capability: str) -> RequestError:
    allowed = f"engines that declare {capability}"
    return RequestError(
        f"{given} with this engine", allowed, "Pass another engine, such as --engine oengine."
    )


def _is_not_compiled(given: str, setting: str) -> RequestError:
    return RequestError(
        f"{given} with forbid_compiling, but without the programs for it",
        "requests for which warmup() compiles programs",
        f"Set {setting} = true in the configuration: warmup() compiles them too.",
    )
