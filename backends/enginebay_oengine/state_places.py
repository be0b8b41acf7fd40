"""StatePlaces: the places of a group with a recurrent state, one of each row, and snapshots."""

from __future__ import annotations

from enginebay.errors import InternalError
from enginebay.rows import PageTable
from enginebay_oengine.store import PageStore


class StatePlaces:
    """Gives each row a place, and keeps copies of rows' states, *snapshots*, under hashes of the
    tokens that they are the states after.

    Snapshots rest in the places that no row has, the least recently used makes room first. The pool
    has a place for every row, so `give` never fails.
    """

    def __init__(self, store: PageStore, table: PageTable, snapshot_tokens: int) -> None:
        """`snapshot_tokens`: after how many tokens of a prompt a snapshot is kept."""
        self.store, self.table, self.snapshot_tokens = store, table, snapshot_tokens
        self._places: dict[int, int] = {}

    def give(self, row: int, snapshot: bytes | None) -> tuple[int, int | None]:
        """A row's place, and the place of the snapshot that is to be copied there. These are the
        same where no other one was left to make room.
        """
        source = None if snapshot is None else self.store.find(snapshot)
        if source is not None:  # used now, so that another one makes room if there is one
            self.store.share(source)
            self.store.drop(source)
        place = self._places[row] = self.store.take()
        self.table.append(row, [place])
        return place, source

    def keep(self, row: int, digest: bytes) -> tuple[int, int] | None:
        """A place (from, to) that a row's state is to be copied to, which is found under the hash
        from now on; None when there is such a snapshot, or no room for one.
        """
        if self.store.find(digest) is not None or not self.store.available():
            return None
        place = self.store.take()
        self.store.name(digest, place)
        self.store.drop(place)
        return self._places[row], place

    def remove(self, row: int) -> None:
        """Take a row's place back."""
        self.table.reset(row)
        self.store.drop(self._places.pop(row))

    def check(self) -> None:
        """InternalError when the books of the pool do not fit those of the rows."""
        self.store.check()
        places = set(self._places.values())
        if len(places) != len(self._places) or self.store.pool.num_used != len(places):
            raise InternalError(
                f"{len(places)} places for {len(self._places)} rows, and "
                f"{self.store.pool.num_used} are in use"
            )
