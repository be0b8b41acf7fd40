"""The logits processors that a request uses, with the options of each."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from enginebay.contracts.constraint import GUIDED, forms_of
from enginebay.contracts.text import Tokenizer
from enginebay.errors import RequestError
from enginebay.row_value import ProcessorOption, declared
from enginebay.types import SamplingParams

PENALTIES = "penalties"

_APPLIED_BY = declared(SamplingParams, ProcessorOption)


def requested_processors(
    params: SamplingParams, tokenizer: Tokenizer, available: Collection[str]
) -> dict[str, Mapping[str, Any]]:
    """The options of each logits processor that `params` uses, by the processor's name.

    `available` are the names of the engine's processors: when `penalties` is not among them, the
    sampler applies penalties itself. RequestError for a processor that is requested both by a field
    of its own and in `processors`, and for bad_words without tokens.
    """
    options: dict[str, dict[str, Any]] = {}
    used = set()
    for name, one in _APPLIED_BY.items():
        value = getattr(params, name)
        options.setdefault(one.processor, {})[one.option] = value
        if one.uses and value != SamplingParams.model_fields[name].get_default(
            call_default_factory=True
        ):
            used.add(one.processor)
    asked: dict[str, Mapping[str, Any]] = {n: values for n, values in options.items() if n in used}
    if forms_of(params):
        asked[GUIDED] = {}
    if params.bad_words:
        asked["bad_words"] = {"sequences": _sequences(params.bad_words, tokenizer)}
    if PENALTIES not in available and not params.suppress_repetition_in_generation:
        asked.pop(PENALTIES, None)
    twice = sorted(asked.keys() & params.processors.keys())
    if twice:
        raise RequestError(
            f"logits processor {twice[0]!r}, both by a field of its own and in processors",
            "one of the two",
            "Remove it from processors.",
        )
    return asked | params.processors


def _sequences(words: tuple[str, ...], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word, both at the beginning of a text and after a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip()
        ways = [
            tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (bare, f" {bare}")
        ]
        if not all(ways):
            given = f"bad_words with {word!r}, which has no tokens"
            raise RequestError(given, "words with at least one token", "Remove this word.")
        found |= dict.fromkeys(ways)
    return tuple(found)
