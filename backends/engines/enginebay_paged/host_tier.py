"""HostTier records which pages of evicted prefixes are in the memory of the host. MoveLog holds the
moves of pages that a ledger orders.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Literal

from enginebay.contracts.cache import PageMove
from enginebay.errors import InternalError
from enginebay_paged.prefix import Evicted

PageSource = Literal["host", "disk"]
"""Where the content of a page came from."""

MAX_READ_S = 0.25
"""Max seconds that an admission reads files. The steps wait meanwhile; the engine computes the
pages that were not read.
"""

ReadFile = Callable[[bytes], Callable[[int], object] | None]
"""Reads the file of a page, by its hash, and returns a function that writes the content to a slot.
Returns None when there is no file, or the file is damaged or too old.
"""


class MoveLog:
    """The moves that a ledger has ordered and the executor has not yet made, in order."""

    def __init__(self) -> None:
        self._moves: list[PageMove] = []
        self._slots: set[tuple[str, int]] = set()

    def copy(self, group: str, source: int, target: int) -> None:
        """Order a copy of a page."""
        self._moves.append(PageMove("copy", group, source, target))

    def out(self, group: str, gone: Evicted, slot: int, age_s: float) -> None:
        """Order the move of a page to the host. Later moves and steps may write to the page."""
        self._slots.add((group, slot))
        self._moves.append(PageMove("out", group, gone.page, slot, gone.digest, age_s))

    def bring(self, group: str, slot: int, page: int) -> None:
        """Order the move of a page from the host."""
        self._slots.add((group, slot))
        self._moves.append(PageMove("in", group, slot, page))

    def uses(self, group: str, slot: int) -> bool:
        """Return whether the log has a move to or from a slot."""
        return (group, slot) in self._slots

    def take(self) -> Sequence[PageMove]:
        """Return all moves, and forget them."""
        if not self._moves:
            return ()
        moves, self._moves = self._moves, []
        self._slots.clear()
        return moves


@dataclasses.dataclass(slots=True)
class HostPage:
    """A page on the host: its slot, when it was last used, and whether a file had it."""

    slot: int
    used_s: float
    source: PageSource = "host"

    def is_old(self, ttl_s: float | None, now_s: float) -> bool:
        """Return whether it was not used for `ttl_s`."""
        return ttl_s is not None and now_s - self.used_s >= ttl_s


class HostTier:
    """The host slots of one cache group. A new page takes a free slot, or else the slot of the
    least recently used page.

    A page stays on the host when its content is brought back to the device: if the device evicts it
    again, nothing is moved. Pages that the request under admission needs stay until `settle`.
    """

    def __init__(
        self,
        group: str,
        num_slots: int,
        log: MoveLog,
        ttl_s: float | None = None,
        read_file: ReadFile | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ttl_s`: seconds to keep an unused page. `clock`: the clock of the PageStore."""
        self.group, self.num_slots, self.ttl_s = group, num_slots, ttl_s
        self._log, self._read_file, self._clock = log, read_file, clock
        self._pages: collections.OrderedDict[bytes, HostPage] = collections.OrderedDict()
        self._free: list[int] = list(range(num_slots - 1, -1, -1))
        self._needed: set[bytes] = set()
        self._next_expiry_s = -math.inf
        self._reads_until_s: float | None = None

    def __len__(self) -> int:
        return len(self._pages)

    def holds(self, digest: bytes) -> bool:
        """Return whether the host has the page with this hash."""
        found = self._pages.get(digest)
        return found is not None and not found.is_old(self.ttl_s, self._clock())

    def need(self, digest: bytes) -> None:
        """Keep the page with this hash until `settle`, if the host has the page or gets it."""
        self._needed.add(digest)
        if digest in self._pages:
            self._pages.move_to_end(digest)

    def settle(self) -> None:
        """End the effect of `need`: any page may lose its slot. Files may be read again."""
        self._needed.clear()
        self._reads_until_s = None

    def save(self, gone: Evicted, *, again: bool = False) -> None:
        """Order a page that the device evicts to the host, unless the host has it or every slot is
        needed. `again`: also if the host has it, because its file may be gone, or look unused.
        """
        found = self._pages.get(gone.digest)
        if found is not None:
            self._use(gone.digest, gone.since_s)
            slot = found.slot if again else None
        elif (slot := self._take()) is not None:
            self._pages[gone.digest] = HostPage(slot, gone.since_s)
        if slot is not None:
            self._log.out(self.group, gone, slot, self._clock() - gone.since_s)

    def bring(self, digest: bytes, page: int) -> PageSource:
        """Order the move of the page with this hash to a page of the device. Returns where its
        content came from.
        """
        found = self._pages[digest]
        source = found.source
        found.source = "host"
        self._use(digest, self._clock())
        self._log.bring(self.group, found.slot, page)
        return source

    def recall(self, digest: bytes) -> bool:
        """Read the page with this hash from its file to a slot. Returns whether the page was read;
        False also when files were read for MAX_READ_S since `settle`.
        """
        if self._read_file is None or digest in self._pages:  # too old; its slot may be in use
            return False
        now_s = self._clock()
        if self._reads_until_s is None:
            self._reads_until_s = now_s + MAX_READ_S
        # The slot is written at once, so no ordered move may use it.
        if now_s >= self._reads_until_s or self._next_slot(idle=True) is None:
            return False
        write = self._read_file(digest)
        slot = None if write is None else self._take(idle=True)
        if write is None or slot is None:
            return False
        write(slot)
        self._pages[digest] = HostPage(slot, now_s, "disk")
        return True

    def expire(self) -> None:
        """Forget the pages that were not used for ttl_s. Does nothing if this was done less than a
        hundredth of ttl_s ago.
        """
        now_s = self._clock()
        if self.ttl_s is None or now_s < self._next_expiry_s:
            return
        self._next_expiry_s = now_s + self.ttl_s / 100
        for digest in [d for d, one in self._pages.items() if one.is_old(self.ttl_s, now_s)]:
            self._free.append(self._pages.pop(digest).slot)

    def forget(self) -> None:
        """Forget all pages."""
        self._pages.clear()
        self._free = list(range(self.num_slots - 1, -1, -1))

    def check(self) -> None:
        """Raise InternalError unless each slot is free or has one page."""
        slots = sorted([*self._free, *(one.slot for one in self._pages.values())])
        if slots != list(range(self.num_slots)):
            raise InternalError(f"host slots of {self.group!r} are lost or have two pages: {slots}")

    def _use(self, digest: bytes, now_s: float) -> None:
        page = self._pages[digest]
        page.used_s = max(page.used_s, now_s)
        self._pages.move_to_end(digest)

    def _take(self, *, idle: bool = False) -> int | None:
        """Take the next slot. None when there is none."""
        found = self._next_slot(idle=idle)
        if found is None:
            return None
        slot, digest = found
        if digest is None:
            return self._free.pop()
        del self._pages[digest]
        return slot

    def _next_slot(self, *, idle: bool) -> tuple[int, bytes | None] | None:
        """The slot to take next, and the hash of the page there: the first one that is not needed,
        if no slot is free. `idle`: no ordered move may use the slot. None when there is no slot.
        """

        def may_go(slot: int) -> bool:
            return not (idle and self._log.uses(self.group, slot))

        if self._free and may_go(self._free[-1]):
            return self._free[-1], None
        for digest, page in self._pages.items():
            if digest not in self._needed and may_go(page.slot):
                return page.slot, digest
        return None
