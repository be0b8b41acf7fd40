"""Checks JSON and configurations from outside for their nesting, which Python's own functions
follow only to a limited depth.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from enginebay.errors import InputError, shown_text

MAX_DEPTH = 100
"""Max nesting of lists and objects. Configurations have a few levels; Python's recursion limit is
near a thousand.
"""


def parse_json(
    text: str | bytes, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None
) -> Any:
    """Parse a JSON text. `pairs`, if given, is called with the list of pairs of each object, and
    its result is used in place of a dict.

    InputError for a text that is not JSON, that is nested deeper than MAX_DEPTH, or that `pairs`
    refuses with a ValueError.
    """
    try:
        value = json.loads(text, object_pairs_hook=pairs)
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"text that is not JSON ({fault_of(error)})",
            f"JSON with at most {MAX_DEPTH} levels of nesting",
            "Check that the text is complete.",
        ) from None
    check_depth(value)
    return value


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
