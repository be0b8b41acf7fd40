"""A model of the device for checks of ledgers: the contents of each cache page, without arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from enginebay.contracts.cache import Lease, Ledger, PageMove


def whole_prefixes(token_ids: Sequence[int]) -> list[int]:
    """Return one number per position for all tokens up to it: keys and values depend on all of
    them.
    """
    values, last = [], 0
    for token in token_ids:
        last = hash((last, token))
        values.append(last)
    return values


@dataclasses.dataclass(slots=True)
class Row:
    """A running request: its tokens, the first num_computed of which are in the cache."""

    lease: Lease
    token_ids: list[int]
    num_prompt: int
    num_computed: int
    num_committed: int
    fork_at: int | None = None
    """Number of its prompt tokens after which other requests may fork this one."""


@dataclasses.dataclass
class Device:
    """The contents of cache pages by group, page and offset, and of a group's slots on the host
    under the name "host GROUP". A place of a group with a state holds one value, for the last token
    that the state includes.
    """

    contents: dict[tuple[str, int, int], int] = dataclasses.field(default_factory=dict)

    def run(self, move: PageMove, page_size: int) -> None:
        """Make a move of a page."""
        source = (f"host {move.group}" if move.kind == "in" else move.group), move.source
        target = (f"host {move.group}" if move.kind == "out" else move.group), move.target
        for offset in range(page_size):
            value = self.contents.get((*source, offset))
            if value is None:
                self.contents.pop((*target, offset), None)
            else:
                self.contents[*target, offset] = value

    def write_places(self, ledger: Ledger, lease: Lease, value: int) -> None:
        """Write a value to the places of a row."""
        for group in ledger.states:
            self.contents[_place(ledger, group, lease)] = value

    def check_places(self, ledger: Ledger, rows: Mapping[int, Row]) -> None:
        """Check that each row has a place of its own, with the state after its computed tokens. A
        row without computed tokens starts from a state of zeros, whatever its place holds.
        """
        for group in ledger.states:
            places = {row: _place(ledger, group, one.lease) for row, one in rows.items()}
            assert len(set(places.values())) == len(places), f"rows share places: {places}"
            for row, place in places.items():
                one = rows[row]
                values = whole_prefixes(one.token_ids[: one.num_computed])
                assert not values or self.contents.get(place) == values[-1], (
                    f"row {row} continues after {one.num_computed} tokens from a wrong state, "
                    f"place {place[1]}"
                )


def _place(ledger: Ledger, group: str, lease: Lease) -> tuple[str, int, int]:
    table = np.zeros((1, 1), np.int32)
    ledger.write_table(group, [lease], table)
    return group, int(table[0, 0]), 0
