"""Priority: values that a request passes to the scheduler, and the name of its adapter."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any, TypedDict, TypeGuard, cast

import numpy as np

from enginebay.contracts.text import ChatOptions
from enginebay.errors import RequestError, shown

Priorities = int | Sequence[int]
Tenants = str | Sequence[str] | None
Salts = str | Sequence[str] | None
Loras = str | Sequence[str | None] | None


class RequestKeywords(TypedDict, total=False):
    """Keywords of a single request: how urgent it is, whose it is, with whom it shares its prefix,
    and the name of its adapter.
    """

    priority: int
    tenant: str | None
    cache_salt: str | None
    lora: str | None


class ChatKeywords(ChatOptions, RequestKeywords, total=False):
    """Keywords of a chat request: a RequestKeywords's, and the options of the chat template."""


def split_chat_keywords(options: ChatKeywords) -> tuple[ChatOptions, RequestKeywords]:
    """Split the keywords of a chat into the options of the template and the RequestKeywords."""
    turn = {
        name: value for name, value in options.items() if name in RequestKeywords.__annotations__
    }
    chat = {name: value for name, value in options.items() if name not in turn}
    return cast("ChatOptions", chat), cast("RequestKeywords", turn)


class BatchKeywords(TypedDict, total=False):
    """Keywords of several prompts: each is one value for all, or a list with one per prompt."""

    priority: Priorities
    tenant: Tenants
    cache_salt: Salts
    lora: Loras


MAX_PRIORITY = 10**9
"""Schedulers combine a priority with an arrival time in one float; a larger priority would leave no
digits for the time.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class RequestPriority:
    """A request's priority (larger is more urgent), the tenant that it is charged to ("": none),
    the salt of its cached prefix ("": none), and the name of its adapter ("": none).
    """

    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    lora: str = ""


def priorities_of(
    num_prompts: int,
    priority: Priorities = 0,
    tenant: Tenants = None,
    cache_salt: Salts = None,
    lora: Loras = None,
) -> list[RequestPriority]:
    """One RequestPriority per prompt. RequestError for an invalid value, and for a list of another
    length than `num_prompts`.
    """
    texts = (("tenant", tenant), ("cache_salt", cache_salt), ("lora", lora))
    tenants, salts, loras = [
        [_text(name, one) for one in one_per_prompt(num_prompts, given, f"{name}s")]
        for name, given in texts
    ]
    priorities = map(_priority, one_per_prompt(num_prompts, priority, "priorities"))
    return [RequestPriority(*each) for each in zip(priorities, tenants, salts, loras, strict=True)]


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """Whether this is a sequence of values; text and bytes are not."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(
        value, str | bytes | bytearray | memoryview
    )


def one_per_prompt(num_prompts: int, given: Any, what: str) -> list[Any]:
    """A list with one value per prompt, made from one value for all prompts or a list. RequestError
    for a list of another length; `what` is the name of the values in the message.
    """
    if given is None or isinstance(given, str) or not is_list(given):
        return [given] * num_prompts
    if len(given) != num_prompts:
        raise RequestError(
            f"{len(given)} {what} for {num_prompts} prompts",
            "one for all prompts, or one per prompt",
            f"Pass a list of {num_prompts}.",
        )
    return list(given)


def _priority(given: Any) -> int:
    try:
        number = None if isinstance(given, bool | np.bool_) else operator.index(given)
    except TypeError:
        number = None
    if number is None or abs(number) > MAX_PRIORITY:
        raise RequestError(
            f"priority = {shown(given)}",
            f"a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}, where larger is more urgent",
            "Pass a number in this range, such as priority=1.",
        )
    return number


def _text(name: str, given: Any) -> str:
    if given is None:
        return ""
    if not isinstance(given, str) or not given:
        raise RequestError(
            f"{name} = {shown(given)}",
            "a text that is not empty, or None",
            f"Pass a text, or leave {name} out.",
        )
    return given
