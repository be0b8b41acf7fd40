"""StatePlaces: the places of a group with a recurrent state, one per row, and snapshots."""

from __future__ import annotations

from enginebay.errors import InternalError
from enginebay_paged.store import PageStore
from enginebay_runtime.rows import PageTable


class StatePlaces:
    """Gives each row a place, and keeps *snapshots*: copies of row states under the hash of their
    tokens.

    Snapshots occupy places that no row uses, and are evicted in the order of `RestingPages`. The
    pool has a place for every row, so `give` never fails.
    """

    def __init__(self, store: PageStore, table: PageTable, snapshot_tokens: int) -> None:
        """`snapshot_tokens`: prompt tokens between snapshots."""
        self.store, self.table, self.snapshot_tokens = store, table, snapshot_tokens
        self._places: dict[int, int] = {}

    def give(self, row: int, snapshot: bytes | None) -> tuple[int, int | None]:
        """Return a row's place, and the place of the snapshot to copy there. They are equal when
        the snapshot's place was the only one left.
        """
        source = None if snapshot is None else self.store.find(snapshot)
        if source is not None:  # mark it as used, so that another snapshot is evicted if possible
            self.store.share(source)
            self.store.drop(source)
        place = self._places[row] = self.store.take()
        self.table.append(row, [place])
        return place, source

    def keep(self, row: int, digest: bytes, *, is_passed: bool = False) -> tuple[int, int] | None:
        """Return (from, to) places for a snapshot of a row's state, to be found under `digest` from
        now on. None when the snapshot exists, or there is no room. `is_passed`: the row makes
        another one.
        """
        if self.store.find(digest) is not None or not self.store.available():
            return None
        place = self.store.take()
        self.store.name(digest, place)
        self.store.drop(place, is_passed=is_passed)
        return self._places[row], place

    def remove(self, row: int) -> None:
        """Release a row's place."""
        self.table.reset(row)
        self.store.drop(self._places.pop(row))

    def check(self) -> None:
        """Raise InternalError when the pool and the rows' places do not agree."""
        self.store.check()
        places = set(self._places.values())
        if len(places) != len(self._places) or self.store.pool.num_used != len(places):
            raise InternalError(
                f"{len(places)} places for {len(self._places)} rows, and "
                f"{self.store.pool.num_used} are in use"
            )
