"""What lies in the pages of a cache, in a model of the device without arrays of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from enginebay.cache import Lease, Ledger


def whole_prefixes(token_ids: Sequence[int]) -> list[int]:
    """What the keys and values at each position depend on: all tokens up to it, as one number."""
    values, last = [], 0
    for token in token_ids:
        last = hash((last, token))
        values.append(last)
    return values


@dataclasses.dataclass(slots=True)
class Row:
    """A running request: its tokens, of which the first num_computed are in the cache."""

    lease: Lease
    token_ids: list[int]
    num_prompt: int
    num_computed: int
    num_committed: int
    fork_at: int | None = None
    """After how many tokens of its prompt others may fork it."""


@dataclasses.dataclass
class Device:
    """What lies in the pages of a cache, by group, page and offset. In a place of a group with a
    state lies one value, that of the last token which the state is after.
    """

    contents: dict[tuple[str, int, int], int] = dataclasses.field(default_factory=dict)

    def copy(self, group: str, source: int, target: int, page_size: int) -> None:
        """Copy a page."""
        for offset in range(page_size):
            value = self.contents.get((group, source, offset))
            if value is None:
                self.contents.pop((group, target, offset), None)
            else:
                self.contents[group, target, offset] = value

    def write_places(self, ledger: Ledger, lease: Lease, value: int) -> None:
        """Leave a value in the places of a row."""
        for group in ledger.states:
            self.contents[_place(ledger, group, lease)] = value

    def check_places(self, ledger: Ledger, rows: Mapping[int, Row]) -> None:
        """Each row has a place of its own, with the state after the tokens that it has computed; a
        row without any has a state of zeros, whatever its place holds.
        """
        for group in ledger.states:
            places = {row: _place(ledger, group, one.lease) for row, one in rows.items()}
            assert len(set(places.values())) == len(places), f"rows share places: {places}"
            for row, place in places.items():
                one = rows[row]
                values = whole_prefixes(one.token_ids[: one.num_computed])
                assert not values or self.contents.get(place) == values[-1], (
                    f"row {row} goes on after {one.num_computed} tokens from the state of others, "
                    f"place {place[1]}"
                )


def _place(ledger: Ledger, group: str, lease: Lease) -> tuple[str, int, int]:
    table = np.zeros((1, 1), np.int32)
    ledger.write_table(group, [lease], table)
    return group, int(table[0, 0]), 0
