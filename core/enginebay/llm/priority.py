"""Priority: what a request says about its turn, for schedulers that look at it; it changes no
token.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any, TypedDict, TypeGuard, cast

import numpy as np

from enginebay.errors import RequestError, shown
from enginebay.text import ChatOptions

Priorities = int | Sequence[int]
Tenants = str | Sequence[str] | None
Salts = str | Sequence[str] | None


class Turn(TypedDict, total=False):
    """What a request may say besides its prompt and its sampling."""

    priority: int
    tenant: str | None
    cache_salt: str | None


class ChatTurn(ChatOptions, Turn, total=False):
    """The same of a request whose prompt is a conversation, and how this is rendered."""


def split_turn(options: ChatTurn) -> tuple[ChatOptions, Turn]:
    """How a conversation is rendered, and what its request says about its turn."""
    turn = {name: value for name, value in options.items() if name in Turn.__annotations__}
    chat = {name: value for name, value in options.items() if name not in turn}
    return cast("ChatOptions", chat), cast("Turn", turn)


class Turns(TypedDict, total=False):
    """The same for several prompts: one value for all, or one for each."""

    priority: Priorities
    tenant: Tenants
    cache_salt: Salts


MAX_PRIORITY = 10**9
"""Schedulers count a priority against times of arrival; with larger ones these would have no digits
left.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Priority:
    """A priority, of which larger is more urgent, the tenant on whose account a request runs
    ("": none is named), and the salt of its prefix ("": none).
    """

    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""


def priorities_of(
    num_prompts: int, priority: Priorities = 0, tenant: Tenants = None, cache_salt: Salts = None
) -> list[Priority]:
    """Those of each prompt, from one value for all or one for each. RequestError for other values,
    or other counts.
    """
    texts = (("tenant", tenant), ("cache_salt", cache_salt))
    tenants, salts = (
        [_text(name, one) for one in _each(num_prompts, given, f"{name}s")] for name, given in texts
    )
    priorities = map(_priority, _each(num_prompts, priority, "priorities"))
    return [Priority(*each) for each in zip(priorities, tenants, salts, strict=True)]


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """Whether this is several values, and no text."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(
        value, str | bytes | bytearray | memoryview
    )


def _each(num_prompts: int, given: Any, what: str) -> list[Any]:
    if not is_list(given):
        return [given] * num_prompts
    if len(given) != num_prompts:
        raise RequestError(
            f"{len(given)} {what} for {num_prompts} prompts",
            "one for all, or one per prompt",
            "Give as many.",
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
            f"a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}, "
            "of which larger is more urgent",
            "Correct it.",
        )
    return number


def _text(name: str, given: Any) -> str:
    if given is None:
        return ""
    if not isinstance(given, str) or not given:
        raise RequestError(
            f"{name} = {shown(given)}",
            "a text that is not empty, or None",
            "Name one, or leave it out.",
        )
    return given
