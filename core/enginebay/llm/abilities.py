"""Abilities: what requests may ask of an engine's parts, and the errors for what they may not."""

from __future__ import annotations

import dataclasses
from typing import get_args

from enginebay.compose.guides import choose_guide
from enginebay.compose.plan import Plan
from enginebay.compose.processors import ChosenProcessors
from enginebay.compose.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from enginebay.constraint import MakeGuide
from enginebay.errors import RequestError, shown
from enginebay.llm.choice import Choice
from enginebay.llm.requested_processors import PENALTIES
from enginebay.types import ALL_LOGPROBS, MAX_LOGPROBS, ROW_VALUES, Pooling, SamplingParams


@dataclasses.dataclass(frozen=True, slots=True)
class Abilities:
    """What requests may ask of the parts of a plan, by what these declare."""

    greedy_only: bool
    returns_logprobs: bool
    processors: ChosenProcessors
    make_guide: MakeGuide
    hidden_size: int
    returns_full_vocab: bool = False
    """Log-probabilities of prompts and of the whole vocabulary."""
    returns_hidden: bool = False
    """Hidden states of prompts."""
    compiles_hidden: bool = True
    """Whether the programs that return them are there after warmup(), or may be compiled later."""
    takes_embeds: bool = False
    """Embeddings in prompts."""
    compiles_embeds: bool = True
    """The same for the programs that take them."""
    compiles_wide: bool = True
    """Whether the programs that tell them are there after warmup(), or may be compiled later."""
    defaults: SamplingDefaults = NO_DEFAULTS
    """The checkpoint's values for fields of SamplingParams that a request leaves out."""

    @staticmethod
    def of(plan: Plan) -> Abilities:
        """Those of the sampler and the engine that a plan has chosen."""
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
            compiles_wide=plan.config.full_vocab_logprobs or not plan.config.forbid_compiling,
            defaults=plan.sampling_defaults,
        )


def check_penalties(params: SamplingParams, abilities: Abilities) -> None:
    """RequestError for a penalty that neither the sampler nor the logits processor `penalties`
    applies.
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
                f"Choose sampler standard, or add {PENALTIES} to the setting processors.",
            )


def check_logprobs(params: SamplingParams, abilities: Abilities) -> None:
    """RequestError for log-probabilities that the engine cannot tell."""
    chooses = Choice.of(params) is not None
    if not abilities.returns_logprobs and (params.logprobs is not None or chooses):
        field, value = (
            ("best_of", params.best_of)
            if params.logprobs is None
            else ("logprobs", params.logprobs)
        )
        raise RequestError(
            f"{field} = {value} with an engine that tells no log-probabilities",
            f"{field} = None",
            "Leave it out, or choose an engine that declares logprobs, such as oengine.",
        )
    full_vocab = {"logprobs": params.logprobs} if params.logprobs == ALL_LOGPROBS else {}
    if params.prompt_logprobs is not None:
        full_vocab["prompt_logprobs"] = params.prompt_logprobs
    for field, value in full_vocab.items():
        if not abilities.returns_full_vocab:
            raise RequestError(
                f"{field} = {value} with an engine that tells neither of prompts nor of the "
                "whole vocabulary",
                f"{field} = None"
                if field == "prompt_logprobs"
                else f"logprobs = 0 to {MAX_LOGPROBS}",
                "Leave it out, or choose an engine that declares full_vocab_logprobs, "
                "such as oengine.",
            )
        if not abilities.compiles_wide:
            raise RequestError(
                f"{field} = {value} under forbid_compiling, without the programs for it",
                "requests that warmup() compiles for",
                "Set full_vocab_logprobs = true in the configuration, so that it compiles them.",
            )


def check_pooling(pooling: object, abilities: Abilities) -> None:
    """RequestError for an unknown pooling, and where hidden states cannot be returned."""
    if pooling not in get_args(Pooling):
        allowed = " or ".join(map(repr, get_args(Pooling)))
        raise RequestError(f"pooling = {shown(pooling)}", allowed, "Pass one of them.")
    if not abilities.returns_hidden:
        raise _cannot("embed()", "hidden_states")
    if not abilities.compiles_hidden:
        raise _is_not_compiled("embed()", "embeddings")


def check_embeds(params: SamplingParams, abilities: Abilities) -> None:
    """RequestError where a prompt cannot have embeddings."""
    if not abilities.takes_embeds:
        raise _cannot("embeddings in a prompt", "prompt_embeds")
    if not abilities.compiles_embeds:
        raise _is_not_compiled("embeddings in a prompt", "prompt_embeds")
    if params.prompt_logprobs is not None:
        raise RequestError(
            f"prompt_logprobs = {params.prompt_logprobs} with embeddings in the prompt",
            "prompt_logprobs = None: embeddings have no token ids",
            "Leave it out.",
        )


def _cannot(given: str, capability: str) -> RequestError:
    allowed = f"engines that declare {capability}"
    return RequestError(
        f"{given} with this engine", allowed, "Choose another engine, such as oengine."
    )


def _is_not_compiled(given: str, setting: str) -> RequestError:
    return RequestError(
        f"{given} under forbid_compiling, without the programs for it",
        "what warmup() compiles for",
        f"Set {setting} = true in the configuration, so that it compiles these too.",
    )
