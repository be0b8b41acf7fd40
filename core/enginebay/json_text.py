"""Parses JSON texts from outside, which may be nested deeper than Python can follow."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from enginebay.errors import InputError
from enginebay.nesting import MAX_DEPTH, check_depth, fault_of


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
