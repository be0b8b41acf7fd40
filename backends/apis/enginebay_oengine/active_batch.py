"""ActiveSequenceBatch: the decode state, which maps slots to sequences and holds the slots' rows on
the device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
import weakref
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.contracts.cache import Lease
from enginebay.errors import InputError
from enginebay_oengine.iteration import InitialSequenceRequest
from enginebay_oengine.page_manager import HBMPageManager
from enginebay_paged.page_steps import POOL, PageRows, StepGeometry, make_page_rows


@dataclasses.dataclass(slots=True, eq=False)
class ActiveRequest:
    """The sequence in a slot.

    `length` counts its tokens, of which the last is not in the cache. It is an upper bound, because
    the device may have ended the sequence. `lease` is None after the sequence lost its pages:
    because it `has_ended`, or until it is processed again.
    """

    id: str
    lease: Lease | None
    length: int
    is_decoding: bool = True
    request: InitialSequenceRequest | None = None
    has_ended: bool = False


@dataclasses.dataclass(frozen=True)
class StateSizes:
    """Sizes of a decode state: number of slots, rows on the device, max tokens of a sequence,
    end-of-sequence ids, and the geometry of steps.
    """

    num_slots: int
    num_rows: int
    max_length: int
    eos_token_ids: tuple[int, ...]
    geometry: StepGeometry


class ActiveSequenceBatch:
    """The slots of an engine. The engine's methods change it in place and return it.

    `rows` are the slots' columns on the device, donated to every step. `available_slots` are the
    free slots; `active_slot_requests_map` maps each occupied slot to its sequence. Both change only
    under `context_lock`.
    """

    def __init__(self, manager: HBMPageManager, sizes: StateSizes) -> None:
        self.manager = manager
        self.sizes = sizes
        self.rows = make_rows(manager, sizes)
        self.available_slots: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(sizes.num_slots):
            self.available_slots.put(slot)
        self.active_slot_requests_map: dict[int, ActiveRequest] = {}
        self.context_lock = threading.RLock()
        weakref.finalize(self, _release, manager, self.active_slot_requests_map).atexit = False

    @property
    def token_ids(self) -> jax.Array:
        """int32 [slots]: each sequence's last token, which is not in the cache yet; 0 in free
        slots.
        """
        return jnp.where(self._decoding(), self.rows.last_token[: self.sizes.num_slots], 0)

    @property
    def positions(self) -> jax.Array:
        """int32 [slots]: position of each sequence's last token; -1 in free slots."""
        return jnp.where(self._decoding(), self.rows.length[: self.sizes.num_slots] - 1, -1)

    @property
    def page_table(self) -> jax.Array:
        """int32 [slots, pages of the longest sequence]; 0 (the dummy page) in unused entries."""
        table = np.zeros(
            (self.sizes.num_slots, self.manager.metadata.max_pages_per_sequence), np.int32
        )
        with self.context_lock:
            for slot, active in self.active_slot_requests_map.items():
                if active.lease is not None:
                    table[slot, : len(active.lease.pages[POOL])] = active.lease.pages[POOL]
        return jnp.asarray(table)

    def check_free(self, slot: int) -> None:
        """Raise InputError (a ValueError) for an occupied slot, or a number out of range."""
        if isinstance(slot, bool) or not isinstance(slot, int | np.integer):
            raise InputError(f"slot {slot!r}", "an integer", "Take one of available_slots.")
        if not 0 <= slot < self.sizes.num_slots:
            raise InputError(
                f"slot {slot}", f"0 to {self.sizes.num_slots - 1}", "Take one of available_slots."
            )
        if slot in self.active_slot_requests_map:
            raise InputError(
                f"slot {slot}, which is occupied",
                "a free slot",
                "Free it with free_resource first.",
            )

    def occupy(self, slot: int, active: ActiveRequest) -> None:
        """Put a sequence into a free slot, and remove the slot from available_slots if it is still
        there.
        """
        with self.context_lock:
            self.check_free(slot)
            self.active_slot_requests_map[slot] = active
            others = [free for free in _drain(self.available_slots) if free != slot]
            for free in others:
                self.available_slots.put(free)

    def take_slot(self, active: ActiveRequest) -> int | None:
        """Put a sequence into the next free slot, and return the slot; None when no slot
        is free.
        """
        with self.context_lock, contextlib.suppress(queue.Empty):
            slot = self.available_slots.get_nowait()
            self.active_slot_requests_map[slot] = active
            return slot
        return None

    def vacate(self, slot: int) -> bool:
        """Free a slot and its pages. Returns False when the slot is free already."""
        with self.context_lock:
            active = self.active_slot_requests_map.pop(slot, None)
            if active is None:
                return False
            if active.lease is not None:
                self.manager.release(active.lease)
            self.available_slots.put(slot)
            return True

    def vacate_all(self) -> None:
        """Free every slot."""
        with self.context_lock:
            for slot in list(self.active_slot_requests_map):
                self.vacate(slot)

    def _decoding(self) -> np.ndarray:
        mask = np.zeros(self.sizes.num_slots, bool)
        with self.context_lock:
            mask[
                [s for s, active in self.active_slot_requests_map.items() if active.is_decoding]
            ] = True
        return mask


def make_rows(manager: HBMPageManager, sizes: StateSizes) -> PageRows:
    """Make rows without requests, replicated on all devices."""
    return make_page_rows(sizes.num_rows, sizes.max_length, manager.metadata.placement)


def _drain(slots: queue.SimpleQueue[int]) -> Iterator[int]:
    """Empty the queue, yielding its slots."""
    with contextlib.suppress(queue.Empty):
        while True:
            yield slots.get_nowait()


def _release(manager: HBMPageManager, active: dict[int, ActiveRequest]) -> None:
    manager.release_later([one.lease for one in active.values() if one.lease is not None])
