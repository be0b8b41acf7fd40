"""Lists of SamplingParams are refused by their length, before any item is looked at."""

from __future__ import annotations

from typing import Any

import pytest

from enginebay import SamplingParams
from enginebay.errors import RequestError
from enginebay.types import MAX_ITEMS


class Unread:
    """An item that no check may look at."""

    def __eq__(self, other: object) -> bool:
        raise AssertionError("an item was read")

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("name", sorted(MAX_ITEMS))
def test_a_long_list_is_refused_before_its_items(name: str) -> None:
    most = MAX_ITEMS[name].items
    given: Any = [Unread()] * (most + 1)
    if name in ("logit_bias", "processors"):
        given = dict.fromkeys(range(most + 1), Unread())
    fields: dict[str, Any] = {name: given}
    with pytest.raises(RequestError, match=f"^{name} = a list of {most + 1} items.*{most}"):
        SamplingParams(**fields)
    MAX_ITEMS[name].check(name, list(given)[:most])


@pytest.mark.parametrize(("name", "most"), [("stop", 4096), ("bad_words", 4096)])
def test_a_long_text_of_a_list_is_refused(name: str, most: int) -> None:
    right: dict[str, Any] = {name: ["a" * most]}
    long: dict[str, Any] = {name: ["a" * (most + 1)]}
    SamplingParams(**right)
    with pytest.raises(RequestError, match=f"{name} = a text of {most + 1} characters"):
        SamplingParams(**long)


def test_one_stop_text_is_limited_as_a_list_of_one() -> None:
    with pytest.raises(RequestError, match="stop = a text of 5000 characters"):
        SamplingParams(stop="a" * 5000)
