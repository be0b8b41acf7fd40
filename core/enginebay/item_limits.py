"""Max numbers of items and characters of the fields of a request, which are checked by length
before any item is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final

import numpy as np

from enginebay.errors import RequestError, shown

MAX_ITEMS: Final[Mapping[str, int]] = {
    "stop": 128,
    "stop_token_ids": 1024,
    "stop_words_ids": 128,
    "logit_bias": 1024,
    "allowed_token_ids": 2**20,
    "bad_words": 256,
    "choice": 2**17,  # guided_limits.items has a smaller default
    "processors": 64,
}
"""Max number of items of each field of SamplingParams that takes a list or a mapping."""

MAX_TEXT_CHARS: Final[Mapping[str, int]] = {"stop": 4096, "bad_words": 4096}
"""Max number of characters of each text in a list."""


def check_items(name: str, value: object, *, called: str | None = None) -> None:
    """Raise RequestError when a value of the field `name` has more items, or one of its texts more
    characters, than are allowed. The error calls the field `called`.
    """
    if name not in MAX_ITEMS or not isinstance(
        value, Sequence | AbstractSet | Mapping | np.ndarray
    ):
        return
    called = called or name
    if isinstance(value, range):  # which may have more items than len() can say
        if value[MAX_ITEMS[name] :]:
            raise RequestError(
                f"{called} = {shown(value)}", f"at most {MAX_ITEMS[name]} items", "Leave some out."
            )
        return
    texts: Any = [value] if isinstance(value, str) else value
    if len(texts) > MAX_ITEMS[name]:
        raise RequestError(
            f"{called} = a list of {len(texts)} items",
            f"at most {MAX_ITEMS[name]}",
            "Leave some out.",
        )
    most = MAX_TEXT_CHARS.get(name)
    longest = max((len(one) for one in texts if isinstance(one, str)), default=0) if most else 0
    if most is not None and longest > most:
        raise RequestError(
            f"{called} = a text of {longest} characters", f"at most {most}", "Shorten it."
        )
