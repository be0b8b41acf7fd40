"""Conversion of a request's generation fields to the SamplingParams of its engine."""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
from collections.abc import Callable, Mapping
from typing import Any

from enginebay.errors import RequestError, shown, unknown_name
from enginebay.types import MAX_LOGPROBS, SamplingParams
from enginebay_dashinfer.multimedia import MultiMediaInfo
from enginebay_dashinfer.statuses import AsStatus, RefusedError

GREEDY_BELOW = 1e-6
"""A smaller temperature always takes the most likely token."""

DEFAULTS: Mapping[str, Any] = {
    "do_sample": True,
    "num_beams": 1,
    "num_return_sequences": 1,
    "early_stopping": True,
    "stop_words_ids": (),
    "eos_token_id": None,
    "seed": None,
    "bad_words_ids": (),
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "suppress_repetition_in_generation": False,
    "no_repeat_ngram_size": 0,
    "logprobs": False,
    "top_logprobs": 0,
    "min_length": 0,
    "max_length": None,
    "lora_name": "",
    "mm_info": None,
    "response_format": None,
}
"""Every field of a generation, and its value when a request does not set it. None: eos_token_id of
the model, a seed of the engine's choice, and the engine's max length.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class GenerationChoices:
    """How one request generates: its sampling, the name of its adapter (None: none), the number of
    log-probabilities per token to return (None: none), and its embeddings (None: none).
    """

    params: SamplingParams
    lora: str | None
    num_logprobs: int | None
    media: MultiMediaInfo | None


def to_sampling(
    fields: Mapping[str, Any], num_prompt_tokens: int, engine_max_length: int
) -> GenerationChoices:
    """Check all fields of a request, and return how it generates.

    max_length counts the prompt. RequestError (a ValueError) for an unknown field or a wrong value;
    RefusedError with ALLSPARK_EXCEED_LIMIT_ERROR for a length that the engine or the prompt leaves
    no room for.
    """
    for name in fields:
        if name not in DEFAULTS:
            raise unknown_name("field of a generation", str(name), DEFAULTS)
    given = {**DEFAULTS, **{name: one for name, one in fields.items() if one is not None}}
    for name in ("num_beams", "num_return_sequences"):
        if given[name] != 1:
            todo = f"Leave {name} out, or start several requests."
            raise RequestError(f"{name} = {shown(given[name])}", "1", todo)
    _number(given, "length_penalty", -math.inf)
    media = given["mm_info"]
    if media is not None and not isinstance(media, MultiMediaInfo):
        raise RequestError(f"mm_info = {shown(media)}", "a MultiMediaInfo", "Make one and fill it.")
    lora = given["lora_name"]
    if not isinstance(lora, str):
        raise RequestError(f"lora_name = {shown(lora)}", "text", "Pass the adapter's name.")
    num_logprobs = _num_logprobs(given)
    params = SamplingParams(
        max_tokens=_room(given, num_prompt_tokens, engine_max_length),
        min_tokens=_whole(given, "min_length", 0),
        logprobs=num_logprobs,
        seed=None if given["seed"] is None else _seed(given),
        repetition_penalty=_number(given, "repetition_penalty", 0.0),
        presence_penalty=_number(given, "presence_penalty", -math.inf),
        frequency_penalty=_number(given, "frequency_penalty", -math.inf),
        suppress_repetition_in_generation=_flag(given, "suppress_repetition_in_generation"),
        no_repeat_ngram_size=_whole(given, "no_repeat_ngram_size", 0),
        stop_words_ids=_words(given, "stop_words_ids"),
        skip_special_tokens=False,
        **_distribution(given),
        **_ends(given),
        **_bad_words(given),
        **_format(given),
    )
    return GenerationChoices(params, lora or None, num_logprobs, media)


def _distribution(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of SamplingParams that choose among the tokens of a distribution."""
    temperature = _number(given, "temperature", 0.0)
    top_k, top_p = _whole(given, "top_k", 0), _number(given, "top_p", 0.0)
    if top_p > 1.0:
        raise RequestError(f"top_p = {top_p}", "0 to 1", "Pass 1.0 to keep all tokens.")
    if not _flag(given, "do_sample") or temperature < GREEDY_BELOW or top_p == 0.0:
        return {"temperature": 0.0, "top_k": 0, "top_p": 1.0}
    return {"temperature": temperature, "top_k": top_k, "top_p": top_p}


def _ends(given: Mapping[str, Any]) -> dict[str, Any]:
    """The tokens that end the output. An eos_token_id replaces the model's own."""
    if not _flag(given, "early_stopping"):
        return {"ignore_eos": True}
    if given["eos_token_id"] is None:
        return {}
    return {"ignore_eos": True, "stop_token_ids": (_whole(given, "eos_token_id", 0),)}


def _bad_words(given: Mapping[str, Any]) -> dict[str, Any]:
    sequences = _words(given, "bad_words_ids")
    return {"processors": {"bad_words": {"sequences": sequences}}} if len(sequences) else {}


def _format(given: Mapping[str, Any]) -> dict[str, Any]:
    wanted = given["response_format"]
    if wanted is None:
        return {}
    allowed = '{"type": "json_object"}, or the same with "json_schema" (text)'
    todo = "Pass one of these, or leave response_format out."
    if (
        not isinstance(wanted, Mapping)
        or wanted.get("type") != "json_object"
        or set(wanted) - {"type", "json_schema"}
    ):
        raise RequestError(f"response_format = {shown(wanted)}", allowed, todo)
    schema = wanted.get("json_schema")
    return {"json_object": True} if schema is None else {"json_schema": schema}


def _room(given: Mapping[str, Any], num_prompt_tokens: int, engine_max_length: int) -> int:
    wanted = given["max_length"]
    length = engine_max_length if wanted is None else _whole(given, "max_length", 1)
    if length > engine_max_length:
        raise RefusedError(
            AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR,
            f"max_length = {length}",
            f"at most {engine_max_length}, the max length of the engine",
            "Lower max_length, or install the model with a larger max_length.",
        )
    if num_prompt_tokens >= length:
        raise RefusedError(
            AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR,
            f"a prompt of {num_prompt_tokens} tokens with max_length = {length}",
            f"at most {length - 1} tokens, because max_length counts the prompt",
            "Shorten the prompt, or raise max_length.",
        )
    return length - num_prompt_tokens


def _num_logprobs(given: Mapping[str, Any]) -> int | None:
    num = _whole(given, "top_logprobs", 0)
    if num > MAX_LOGPROBS:
        raise RequestError(f"top_logprobs = {num}", f"0 to {MAX_LOGPROBS}", "Lower top_logprobs.")
    if _flag(given, "logprobs"):
        return num
    if num:
        todo = "Call log_probs(True, ...) of the builder."
        raise RequestError(f"top_logprobs = {num} without logprobs", "logprobs = True", todo)
    return None


def _words(given: Mapping[str, Any], name: str) -> list[list[int]]:
    """Return the field as lists of token ids."""
    try:
        words = [[operator.index(one) for one in word] for word in given[name]]
    except TypeError:
        allowed, todo = "lists of token ids", f"Pass {name} = [[1, 2], [3]], for example."
        raise RequestError(f"{name} = {shown(given[name])}", allowed, todo) from None
    return words


def _seed(given: Mapping[str, Any]) -> int:
    """The seed as a number from 0 to 2**63 - 1; a negative one counts from 2**63 down."""
    return _whole(given, "seed", -(2**63)) % 2**63


def _flag(given: Mapping[str, Any], name: str) -> bool:
    if not isinstance(given[name], bool):
        todo = f"Pass {name} = True or {name} = False."
        raise RequestError(f"{name} = {shown(given[name])}", "True or False", todo)
    return bool(given[name])


def _whole(given: Mapping[str, Any], name: str, lowest: int) -> int:
    return _checked(given, name, operator.index, lowest, "a whole number")


def _number(given: Mapping[str, Any], name: str, lowest: float) -> float:
    def real(value: Any) -> float:
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise TypeError(name)
        return float(value)

    return _checked(given, name, real, lowest, "a number")


def _checked(
    given: Mapping[str, Any], name: str, read: Callable[[Any], Any], lowest: float, kind: str
) -> Any:
    value = given[name]
    try:
        number = None if isinstance(value, bool) else read(value)
    except TypeError:
        number = None
    if number is None or number < lowest:
        least = "" if lowest == -math.inf else f" from {lowest} up"
        raise RequestError(f"{name} = {shown(value)}", kind + least, f"Pass another {name}.")
    return number
