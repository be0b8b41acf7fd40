"""Checks the size of a constraint before it is parsed: bytes, depth, and number of parts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from enginebay.config_sections import GuidedLimits
from enginebay.errors import RequestError
from enginebay.grammar import Form

_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]', re.DOTALL)
_RULE = re.compile(
    r"^[ \t]*[?!]?\w+[^\S\n]*(?:\[[^\]\n]*\][^\S\n]*)?(?:\.-?\d+[^\S\n]*)?:", re.MULTILINE
)
_WHAT = {"json_schema": "lists and objects", "grammar": "rules", "choice": "choices"}


def check_size(form: Form, value: Any, limits: GuidedLimits) -> None:
    """Raise RequestError for a constraint with more bytes, levels or items than `limits` allow.

    Values of a wrong type are left to the code that reads them.
    """
    if isinstance(value, str):
        _refuse_if(form, "bytes", "size_bytes", _num_bytes(value), limits.size_bytes)
    if form == "json_schema":
        _check_json(
            form, _levels_of_text(value) if isinstance(value, str) else _levels(value), limits
        )
    elif form == "choice":
        _refuse_if(form, _WHAT[form], "items", len(value), limits.items)
        total = sum(_num_bytes(one) for one in value)
        _refuse_if(form, "bytes", "size_bytes", total, limits.size_bytes)
    elif form == "grammar":
        _refuse_if(form, _WHAT[form], "items", len(_RULE.findall(value)), limits.items)


def _check_json(form: Form, levels: Iterator[tuple[int, int]], limits: GuidedLimits) -> None:
    """`levels` has one entry per value: its depth, counted for lists and objects only, and its
    bytes.
    """
    items = total = 0
    for depth, num_bytes in levels:
        items, total = items + (depth > 0), total + num_bytes
        _refuse_if(form, "levels of lists and objects", "depth", depth, limits.depth)
        _refuse_if(form, _WHAT[form], "items", items, limits.items)
        _refuse_if(form, "bytes", "size_bytes", total, limits.size_bytes)


def _levels_of_text(text: str) -> Iterator[tuple[int, int]]:
    """Yield the depth of each list and object of a JSON text."""
    depth = 0
    for found in _TOKENS.finditer(text):
        mark = found[0]
        if mark in "[{":
            depth += 1
            yield depth, 0
        elif mark in "]}":
            depth -= 1


def _levels(value: Any) -> Iterator[tuple[int, int]]:
    """Yield each value within a value, without recursion: a schema may contain itself, or one part
    in many places.
    """
    left: list[tuple[int, Any]] = [(1, value)]
    while left:
        depth, one = left.pop()
        if isinstance(one, Mapping):
            yield depth, sum(_num_bytes(key) for key in one if isinstance(key, str)) + 2
            left += [(depth + 1, part) for part in one.values()]
        elif isinstance(one, list | tuple):
            yield depth, 2
            left += [(depth + 1, part) for part in one]
        else:
            yield 0, _num_bytes(one) if isinstance(one, str) else 1


def _num_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _refuse_if(form: Form, what: str, field: str, given: int, most: int) -> None:
    if given > most:
        raise RequestError(
            f"{form} with {given} {what} or more"
            if field != "size_bytes"
            else f"{form} of {given} {what} or more",
            f"{most} (guided_limits.{field})",
            "Simplify it, or raise the limit.",
        )
