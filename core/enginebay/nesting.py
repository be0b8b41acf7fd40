"""JSON from outside: text that is none, or that is nested deeper than Python's own functions
follow, is an InputError.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from enginebay.errors import InputError, shown_text

MAX_DEPTH = 100
"""Levels of lists and objects within one another. Configurations have a few; Python's recursion
ends near a thousand.
"""


def parse_json(
    text: str | bytes, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None
) -> Any:
    """The value of a JSON text. `pairs`: what makes a value of an object's pairs, in place of dict.

    InputError for text that is no JSON, that is nested more than MAX_DEPTH deep, or that `pairs`
    refuses (ValueError).
    """
    try:
        value = json.loads(text, object_pairs_hook=pairs)
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        why = (
            "it is nested too deeply"
            if isinstance(error, RecursionError)
            else shown_text(str(error))
        )
        raise InputError(
            f"text that is no JSON ({why})",
            f"JSON, nested {MAX_DEPTH} deep at most",
            "Was it cut short?",
        ) from None
    check_depth(value)
    return value


def check_depth(value: object) -> None:
    """InputError for lists and mappings that are nested more than MAX_DEPTH deep."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            inner
            for outer in level
            for inner in (
                outer.values()
                if isinstance(outer, Mapping)
                else outer
                if isinstance(outer, list)
                else ()
            )
            if isinstance(inner, list | Mapping)
        ]
        if not level:
            return
    raise InputError(
        "lists or sections that are nested too deeply", f"{MAX_DEPTH} levels", "Make it flatter."
    )
