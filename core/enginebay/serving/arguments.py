"""Checks the keywords of LLM's methods, so that an error names the method that was called, and
describes those of LLM in its help.
"""

from __future__ import annotations

import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from pydantic.fields import FieldInfo

from enginebay.errors import KeywordError, nearest
from enginebay.types import SamplingParams

Method = TypeVar("Method", bound=Callable[..., Any])


def check_keywords(method: Callable[..., Any], given: Mapping[str, object], fields: Any) -> None:
    """KeywordError for a keyword of `given` that is not in `fields`, the TypedDict of the method's
    further keywords.
    """
    if given and not given.keys() <= fields.__optional_keys__:
        unknown = next(k for k in given if k not in fields.__optional_keys__)
        raise _unknown(method.__qualname__, unknown, _known(method, fields))


def checks_keywords(fields: Any) -> Callable[[Method], Method]:
    """Decorates a method with a required keyword, so that a wrong keyword is reported before a
    missing one.
    """

    def decorate(method: Method) -> Method:
        known = _known(method, fields)

        @functools.wraps(method)
        def call(*args: Any, **keywords: Any) -> Any:
            if not known.issuperset(keywords):
                unknown = next(k for k in keywords if k not in known)
                raise _unknown(method.__qualname__, unknown, known)
            return method(*args, **keywords)

        return cast("Method", call)

    return decorate


def argument_lines(fields: Mapping[str, FieldInfo]) -> str:
    """Return a line for each field: its name, and how its description begins."""
    width = max(map(len, fields))
    lines = []
    for name, field in fields.items():
        begin = re.split(r"[.;] ", field.description or "")[0]
        lines.append(
            f"    {name:{width}}  {textwrap.shorten(begin, 90 - width, placeholder=' ...')}"
        )
    return "\n".join(lines)


def _known(method: Callable[..., Any], fields: Any) -> frozenset[str]:
    parameters = inspect.signature(method).parameters.values()
    named = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD][1:]
    known: frozenset[str] = fields.__optional_keys__.union(named)
    return known


def _unknown(title: str, given: str, known: frozenset[str]) -> KeywordError:
    todo = f"Leave {given} out."
    if given in SamplingParams.model_fields:
        todo = f"Pass params=SamplingParams({given}=...)."
    elif near := nearest(given, known):
        todo = f"Did you mean {near}?"
    return KeywordError(f"{title}() with the argument {given}", ", ".join(sorted(known)), todo)
