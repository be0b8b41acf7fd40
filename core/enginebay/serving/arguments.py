"""Checks the keywords of LLM's methods, so that an error names the method that was called."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from enginebay.errors import KeywordError, nearest
from enginebay.serving.priority import ChatTurn, Turn, Turns
from enginebay.types import SamplingParams

_KEYWORDS = {f"Unpack[{one.__name__}]": one for one in (Turn, Turns, ChatTurn)}
Class = TypeVar("Class", bound=type)


def checks_keywords(cls: Class) -> Class:
    """Make each public method of a class whose keywords are a Turn, Turns or ChatTurn refuse other
    keywords with KeywordError.
    """
    for name, method in list(vars(cls).items()):
        if inspect.isfunction(method) and not name.startswith("_"):
            parameters = inspect.signature(method).parameters.values()
            more = next((p for p in parameters if p.kind is p.VAR_KEYWORD), None)
            fields = _KEYWORDS.get(str(more.annotation)) if more is not None else None
            if fields is not None:
                named = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD][1:]
                allowed = (*named, *fields.__annotations__, *_inherited(fields))
                setattr(cls, name, _checked(f"{cls.__name__}.{name}", method, allowed))
    return cls


def _inherited(fields: Any) -> list[str]:
    return sorted(fields.__required_keys__ | fields.__optional_keys__)


def _checked(
    title: str, method: Callable[..., Any], allowed: tuple[str, ...]
) -> Callable[..., Any]:
    known = frozenset(allowed)

    @functools.wraps(method)
    def call(*args: Any, **keywords: Any) -> Any:
        if not known.issuperset(keywords):
            raise _unknown(title, next(k for k in keywords if k not in known), known)
        return method(*args, **keywords)

    return call


def _unknown(title: str, given: str, known: frozenset[str]) -> KeywordError:
    todo = f"Leave {given} out."
    if given in SamplingParams.model_fields:
        todo = f"Pass params=SamplingParams({given}=...)."
    elif near := nearest(given, known):
        todo = f"Did you mean {near}?"
    return KeywordError(f"{title}() with the argument {given}", ", ".join(sorted(known)), todo)
