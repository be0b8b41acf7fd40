"""Registers samplers, eleven logits processors and the proposer "ngram"."""

from __future__ import annotations

from enginebay.plugins.hooks import Register, hookimpl

PROCESSORS = {
    "logit_bias": ("logit_bias:LogitBias", 10, "adds to the logits of single tokens"),
    "guided": ("guided:Guided", 15, "keeps the tokens that a request's grammar allows"),
    "allowed_token_ids": ("masks:AllowedTokenIds", 20, "makes all other tokens impossible"),
    "min_tokens": ("masks:MinTokens", 21, "no end before a number of new tokens"),
    "bad_words": ("bad_words:BadWords", 22, "sequences of tokens that never appear"),
    "no_repeat_ngram": (
        "repetition:NoRepeatNgram",
        23,
        "no sequence of a given length appears twice",
    ),
    "dry": ("repetition:Dry", 40, "repetitions are penalised by their length"),
    "penalties": ("penalties:Penalties", 50, "presence, frequency and repetition"),
    "typical": ("typical:Typical", 110, "keeps tokens whose surprise is near the entropy"),
    "xtc": ("xtc:Xtc", 120, "sometimes removes the most likely tokens"),
    "mirostat": (
        "mirostat:Mirostat",
        130,
        "removes unlikely tokens to keep the surprise near a target",
    ),
}
"""For each processor: its module, its place in the order of application, and its summary."""


@hookimpl
def register_samplers(register: Register) -> None:
    """Register greedy and standard."""
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
def register_processors(register: Register) -> None:
    """Register the processors: biases, masks, repetitions, and last the cuts by probability."""
    for name, (place, order, summary) in PROCESSORS.items():
        register(
            name,
            f"enginebay_samplers.{place}",
            options=f"enginebay_samplers.{place}Options",
            summary=summary,
            capabilities={"order": order, "default": True},
        )


@hookimpl
def register_proposers(register: Register) -> None:
    """Register ngram."""
    register(
        "ngram",
        "enginebay_samplers.ngram:NgramProposer",
        options="enginebay_samplers.ngram:NgramOptions",
        summary="the tokens that followed an earlier occurrence of the last tokens",
    )
