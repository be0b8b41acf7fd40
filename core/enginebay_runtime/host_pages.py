"""HostPages holds the pages that a ledger has moved to the memory of the host."""

from __future__ import annotations

import concurrent.futures
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from enginebay import waits
from enginebay.contracts.cache import PageMove
from enginebay.contracts.commands import CopyPages, PageIn, PageOut
from enginebay.contracts.executor import EngineParts, Executor
from enginebay.errors import InternalError
from enginebay_runtime.geometry import Shapes

MOVED_PAGES = (16, 4, 1)
"""The numbers of pages that one command moves. Each number has two programs in each group."""

MAX_UNREAD = 64
"""Max pages that were read on the device and are not yet on the host."""

THREAD_NAME = "enginebay-host-pages"

MAX_MOVING = MAX_UNREAD + 2 * max(MOVED_PAGES)
"""Max pages on the device that are not in the cache because they are moving."""


class PageStorage(ABC):
    """Keeps copies of pages longer than the host does."""

    @abstractmethod
    def keep(self, group: str, digest: bytes, content: bytes, age_s: float) -> None:
        """Keep the bytes of a page that has arrived on the host, under its hash. `age_s`: seconds
        since it was last used. Called on another thread; does not wait and does not raise.
        """

    @abstractmethod
    def close(self) -> None:
        """End all threads. Nothing is kept after this."""


PageKinds = Mapping[str, tuple[tuple[int, ...], np.dtype]]
"""Shape and dtype of a page in each array of a group, by "group/layer/array"."""


def page_kinds(parts: EngineParts, shapes: Shapes, groups: Collection[str]) -> dict[str, PageKinds]:
    """Return the arrays of a page of each group; `shapes` are the sizes of the cache."""
    layouts = parts.layouts(shapes) if groups else {}
    return {
        group.name: {
            f"{group.name}/{layer}/{name}": (one.shape[1:], jnp.dtype(one.dtype))
            for layer in range(group.num_layers)
            for name, one in layouts[group.name].shapes().items()
        }
        for group in parts.model.info.cache_groups
        if group.name in groups
    }


def kind_bytes(kinds: PageKinds) -> int:
    """Return the bytes of a page on the host."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in kinds.values())


class HostPages:
    """Makes the moves of a ledger's log, in their order, and holds the pages that "out" moves bring
    to slots of the host, as the device stores them.

    A thread copies the pages from the device. So `run` waits only for a page that comes back before
    it was copied, and while more than MAX_UNREAD pages are on their way. The keeper is called on
    that thread; the thread of the steps calls the methods.
    """

    def __init__(
        self,
        parts: EngineParts,
        shapes: Shapes,
        num_slots: Mapping[str, int],
        keeper: PageStorage | None = None,
    ) -> None:
        """`shapes`: of the whole cache. `num_slots`: by group."""
        self._num_slots, self.keeper = dict(num_slots), keeper
        self._kinds = page_kinds(parts, shapes, num_slots)
        self._arrays: dict[str, dict[str, np.ndarray]] = {}
        self._unread: dict[tuple[str, int], concurrent.futures.Future[None]] = {}
        self._thread = concurrent.futures.ThreadPoolExecutor(1, THREAD_NAME)

    @property
    def num_unread(self) -> int:
        """Number of pages that are not yet on the host."""
        return len(self._unread)

    def compile(self, executor: Executor) -> int:
        """Make moves of every size with page 0, which no row reads, so that their programs are
        compiled. Returns the number of programs.
        """
        for group, num in itertools.product(self._kinds, MOVED_PAGES):
            pages = {group: np.zeros(num, np.int32)}
            found = executor.run(PageOut(pages))
            executor.run(PageIn(pages, {name: np.asarray(one) for name, one in found.items()}))
        return 2 * len(MOVED_PAGES) * len(self._kinds)

    def run(self, moves: Sequence[PageMove], executor: Executor) -> None:
        """Make the moves in order."""
        for kind, run in itertools.groupby(moves, lambda move: move.kind):
            groups: dict[str, list[PageMove]] = {}
            for move in run:
                groups.setdefault(move.group, []).append(move)
            if kind == "copy":
                pairs = {
                    group: np.asarray([(one.source, one.target) for one in some], np.int32)
                    for group, some in groups.items()
                }
                executor.run(CopyPages(pairs))
                continue
            for group, some in groups.items():
                for part in _parts(some):
                    if kind == "out":
                        self._save(group, part, executor)
                    else:
                        self._load(group, part, executor)

    def _save(self, group: str, moves: Sequence[PageMove], executor: Executor) -> None:
        pages = np.asarray([move.source for move in moves], np.int32)
        found = executor.run(PageOut({group: pages}))
        arrays = self._slots_of(group)
        # Each page that waits has a slot of its own, so that all are counted.
        slots = [(group, move.target) for move in moves]
        concurrent.futures.wait([self._unread.pop(one) for one in slots if one in self._unread])
        future = self._thread.submit(_store, arrays, moves, found, self.keeper)
        self._unread.update(dict.fromkeys(slots, future))
        while len(self._unread) > MAX_UNREAD:
            self._read(next(iter(self._unread)))

    def _load(self, group: str, moves: Sequence[PageMove], executor: Executor) -> None:
        for move in moves:
            self._read((group, move.source))
        slots = [move.source for move in moves]
        values = {name: array[slots] for name, array in self._slots_of(group).items()}
        pages = np.asarray([move.target for move in moves], np.int32)
        executor.run(PageIn({group: pages}, values))

    def _read(self, slot: tuple[str, int]) -> None:
        """Wait until a slot has its page."""
        future = self._unread.pop(slot, None)
        if future is not None:
            future.result()

    def fill(self, group: str, content: bytes, slot: int) -> None:
        """Write the bytes of a page, as a keeper gets them, to a slot. InternalError for another
        length.
        """
        if len(content) != kind_bytes(self._kinds[group]):
            raise InternalError(f"{len(content)} bytes are no page of the group {group!r}")
        self._read((group, slot))
        start = 0
        for array in self._slots_of(group).values():
            one = array[slot]
            part = np.frombuffer(content, np.uint8, one.nbytes, start)
            array[slot] = part.view(one.dtype).reshape(one.shape)
            start += one.nbytes

    def _slots_of(self, group: str) -> dict[str, np.ndarray]:
        """The arrays of a group's slots. Only slots that were written take memory."""
        if group not in self._arrays:
            num = self._num_slots[group]
            self._arrays[group] = {
                name: np.empty((num, *shape), dtype)
                for name, (shape, dtype) in self._kinds[group].items()
            }
        return self._arrays[group]

    def finish(self) -> None:
        """Wait until all pages have arrived."""
        for slot in list(self._unread):
            self._read(slot)

    def forget(self) -> None:
        """Free all pages, also those that cannot be read because the device failed."""
        concurrent.futures.wait(self._unread.values(), waits.END_S)
        self._unread.clear()
        self._arrays.clear()

    def close(self) -> None:
        """Free all pages, and end the thread and the keeper."""
        self.forget()
        waits.shut_down(self._thread, THREAD_NAME)
        if self.keeper is not None:
            self.keeper.close()


def _parts(moves: Sequence[PageMove]) -> Iterator[Sequence[PageMove]]:
    """The moves in runs of MOVED_PAGES. No run writes to the same place twice, because the order
    within a run is not defined.
    """
    start = 0
    while start < len(moves):
        targets: set[int] = set()
        end = start
        while end < len(moves) and moves[end].target not in targets:
            targets.add(moves[end].target)
            end += 1
        while start < end:
            num = next(num for num in MOVED_PAGES if num <= end - start)
            yield moves[start : start + num]
            start += num


def _store(
    arrays: Mapping[str, np.ndarray],
    moves: Sequence[PageMove],
    found: Mapping[str, jax.Array],
    keeper: PageStorage | None,
) -> None:
    """Copy pages from the device to their slots, and pass them to the keeper."""
    slots = [move.target for move in moves]
    for name, array in arrays.items():
        array[slots] = np.asarray(found[name])
    for move in moves if keeper is not None else ():
        if keeper is not None and move.digest:
            content = b"".join(array[move.target].tobytes() for array in arrays.values())
            keeper.keep(move.group, move.digest, content, move.age_s)
