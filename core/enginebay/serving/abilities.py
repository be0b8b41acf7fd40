"""Abilities: what requests may use of an engine, and the errors for requests that use more."""

from __future__ import annotations

import dataclasses
from typing import get_args

from enginebay.compose.plan import Plan
from enginebay.compose.processors import ChosenProcessors
from enginebay.compose.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from enginebay.contracts.adapters import Adapters, required
from enginebay.errors import RequestError, shown
from enginebay.serving.choice import BestOf
from enginebay.serving.requested_processors import PENALTIES
from enginebay.text.guides.grammars import choose_grammars
from enginebay.text.guides.guide import MakeGuides
from enginebay.types import ALL_LOGPROBS, ROW_VALUES, Pooling, SamplingParams

OPTION_OF = {
    "logprobs": "",
    "full_vocab_logprobs": "full_vocab_logprobs",
    "prompt_embeds": "prompt_embeds",
    "hidden_states": "embeddings",
}
"""The option that makes warmup() compile for a capability; "": it always does."""


@dataclasses.dataclass(frozen=True, slots=True)
class Abilities:
    """What requests may use of an engine, from the declarations of its plugins."""

    greedy_only: bool
    processors: ChosenProcessors
    make_guides: MakeGuides
    hidden_size: int
    capabilities: frozenset[str] = frozenset()
    """The capabilities in OPTION_OF that the engine declares."""
    compiled: frozenset[str] | None = None
    """With forbid_compiling, the capabilities for which warmup() compiles programs; None: all."""
    adapters: Adapters | None = None
    padding_from: int | None = None
    """As in ModelInfo: requests cannot name the token ids from here on."""
    defaults: SamplingDefaults = NO_DEFAULTS
    """The checkpoint's defaults for fields of SamplingParams that a request does not set."""

    @staticmethod
    def of(plan: Plan) -> Abilities:
        """The abilities of the sampler, engine and logits processors that a plan has chosen."""
        config = plan.config
        sampler = plan.registry.find("sampler", config.sampler.name)
        engine = plan.registry.find("engine", config.engine.name)
        options = config.model_dump(include=set(OPTION_OF.values()))
        compiled = {name for name, option in OPTION_OF.items() if options.get(option, True)}
        return Abilities(
            greedy_only=bool(sampler.capability("greedy_only")),
            processors=plan.processors,
            make_guides=choose_grammars(config),
            hidden_size=plan.model.info.hidden_size,
            capabilities=frozenset(name for name in OPTION_OF if engine.capability(name)),
            compiled=frozenset(compiled) if config.forbid_compiling else None,
            adapters=plan.adapters,
            padding_from=plan.model.info.padding_from,
            defaults=plan.sampling_defaults,
        )

    def adapter(self, name: str) -> str:
        """The key of a request's adapter, "" for none. RequestError for a name that is not
        loaded.
        """
        return required(self.adapters, f"lora = {shown(name)}").key_of(name) if name else ""

    def require(self, capability: str, given: str) -> None:
        """RequestError when the engine lacks a capability that a request needs, or its programs."""
        if capability not in self.capabilities:
            raise RequestError(
                f"{given} with an engine without {capability}",
                f"engines that declare {capability}",
                "Leave it out, or pass another engine, such as --engine oengine.",
            )
        if self.compiled is not None and capability not in self.compiled:
            raise RequestError(
                f"{given} with forbid_compiling, but without the programs for it",
                "requests for which warmup() compiles programs",
                f"Set {OPTION_OF[capability]} = true in the configuration: warmup() compiles them "
                "too.",
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
    if params.logprobs is not None:
        abilities.require("logprobs", f"logprobs = {params.logprobs}")
    elif BestOf.of(params) is not None:
        abilities.require("logprobs", f"best_of = {params.best_of}")
    if params.logprobs == ALL_LOGPROBS:
        abilities.require("full_vocab_logprobs", f"logprobs = {ALL_LOGPROBS}")
    if params.prompt_logprobs is not None:
        abilities.require("full_vocab_logprobs", f"prompt_logprobs = {params.prompt_logprobs}")


def check_pooling(pooling: object, abilities: Abilities) -> None:
    """RequestError for an unknown pooling, and when the engine cannot return hidden states."""
    if pooling not in get_args(Pooling):
        allowed = " or ".join(map(repr, get_args(Pooling)))
        raise RequestError(f"pooling = {shown(pooling)}", allowed, "Pass one of the two.")
    abilities.require("hidden_states", "embed()")


def check_embeds(params: SamplingParams, abilities: Abilities) -> None:
    """RequestError when a prompt of this engine cannot contain embeddings."""
    abilities.require("prompt_embeds", "embeddings in a prompt")
    if params.prompt_logprobs is not None:
        raise RequestError(
            f"prompt_logprobs = {params.prompt_logprobs} with embeddings in the prompt",
            "prompt_logprobs = None: embeddings have no token ids",
            "Leave prompt_logprobs out.",
        )
