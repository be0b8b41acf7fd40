"""What this package offers: the samplers "greedy" and "standard", eleven logits processors,
grammars, and the proposer "ngram".
"""

from __future__ import annotations

from enginebay.hooks import Register, hookimpl

PROCESSORS = {
    "logit_bias": ("logit_bias:LogitBias", 10, "adds to the logits of single tokens"),
    "guided": ("guided:Guided", 15, "leaves the tokens that a request's grammar allows"),
    "allowed_token_ids": ("masks:AllowedTokenIds", 20, "makes all other tokens impossible"),
    "min_tokens": ("masks:MinTokens", 21, "no end before so many new tokens"),
    "bad_words": ("bad_words:BadWords", 22, "sequences of tokens that are never finished"),
    "no_repeat_ngram": (
        "repetition:NoRepeatNgram",
        23,
        "no sequence of so many tokens comes twice",
    ),
    "dry": ("repetition:Dry", 40, "long repetitions cost more and more"),
    "penalties": ("penalties:Penalties", 50, "presence, frequency and repetition"),
    "typical": ("typical:Typical", 110, "tokens whose surprise is near the entropy"),
    "xtc": ("xtc:Xtc", 120, "now and then leaves the likeliest tokens out"),
    "mirostat": (
        "mirostat:Mirostat",
        130,
        "cuts unlikely tokens off to keep the surprise near a target",
    ),
}
"""Where each lies in this package, its place in the order of application, and what it does."""


@hookimpl
def register_samplers(register: Register) -> None:
    """greedy and standard."""
    register(
        "greedy",
        "enginebay_samplers.greedy:sample",
        summary="always the best token",
        capabilities={"priority": 0, "greedy_only": True, "exact_greedy": True},
    )
    register(
        "standard",
        "enginebay_samplers.standard:sample",
        summary="penalties, temperature, filters, seeds; greedy at temperature 0",
        capabilities={"priority": 10, "draws": "sample", "exact_greedy": True},
    )


@hookimpl
def register_logits_processors(register: Register) -> None:
    """What adds to scores, what makes tokens impossible, what counts repetitions, and, last, what
    cuts by probability.
    """
    for name, (place, order, summary) in PROCESSORS.items():
        register(
            name,
            f"enginebay_samplers.{place}",
            options=f"enginebay_samplers.{place}Options",
            summary=summary,
            capabilities={"order": order, "default": True},
        )


@hookimpl
def register_grammars(register: Register) -> None:
    """llguidance."""
    register(
        "llguidance",
        "enginebay_samplers.guided_grammar:Llguidance",
        options="enginebay_samplers.guided_grammar:LlguidanceOptions",
        summary="JSON schemas, regular expressions, choices and Lark grammars",
        requires=("llguidance",),
        capabilities={"priority": 0},
    )


@hookimpl
def register_guides(register: Register) -> None:
    """guarded."""
    register(
        "guarded",
        "enginebay_samplers.guides.grammars:choose_grammars",
        summary="the chosen library of grammars, in worker processes with limits",
    )


@hookimpl
def register_proposers(register: Register) -> None:
    """ngram."""
    register(
        "ngram",
        "enginebay_samplers.ngram:NgramProposer",
        options="enginebay_samplers.ngram:NgramOptions",
        summary="what followed the last tokens where they stood before",
    )
