"""Checks values from outside for their nesting, which Python's own functions follow only to a
limited depth.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.errors import InputError, shown_text

MAX_DEPTH = 100
"""Max nesting of lists and objects. Configurations have a few levels; Python's recursion limit is
near a thousand.
"""


def fault_of(error: ValueError | RecursionError) -> str:
    """Return why a parser refused a text."""
    too_deep = isinstance(error, RecursionError)
    return "it is nested too deeply" if too_deep else shown_text(str(error))


def check_depth(value: object) -> None:
    """Raise InputError for lists and mappings that are nested deeper than MAX_DEPTH."""
    level: list[Any] = [[value]]
    for _ in range(MAX_DEPTH + 2):
        inner = [v for one in level for v in (one.values() if isinstance(one, Mapping) else one)]
        level = [each for each in inner if isinstance(each, list | Mapping)]
        if not level:
            return
    raise InputError(
        "lists or sections that are nested too deeply",
        f"at most {MAX_DEPTH} levels",
        "Use fewer levels of nesting.",
    )
