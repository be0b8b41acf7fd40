"""SlotLedger: each row owns one contiguous slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from enginebay.contracts.cache import Lease, Ledger
from enginebay.contracts.cache_shape import CacheShape
from enginebay.contracts.prefix_key import NO_KEY, PrefixKey
from enginebay.errors import InternalError
from enginebay_runtime.rows import PageTable


class SlotLedger(Ledger):
    """Row i owns slot i, for up to max_model_len tokens, from admission to release.

    A slot is a run of consecutive pages, equal in every cache group: a row keeps all positions,
    even in groups with a window. `pages_per_slot` changes when the arrays grow. In a group with a
    recurrent state a slot is one page.
    """

    def __init__(
        self,
        num_slots: int,
        max_model_len: int,
        groups: Sequence[str] = ("full",),
        tables: Sequence[PageTable] = (),
        states: Sequence[str] = (),
    ) -> None:
        """`tables`: page tables whose only page of a row is the row's slot; admit() writes the
        slot there.
        """
        self.windows = dict.fromkeys(groups)
        self.states = tuple(states)
        self.num_slots = num_slots
        self.max_model_len = max_model_len
        self._tables = tables
        self.pages_per_slot = 1
        self._num_used = 0
        """All rows since `free_pages` was called last are below this."""
        self._leases: dict[int, Lease] = {}

    def admit(
        self, row: int, prompt_token_ids: np.ndarray, num_tokens: int, key: PrefixKey = NO_KEY
    ) -> Lease | None:
        if row in self._leases:
            raise InternalError(f"row {row} is admitted twice: release its lease first")
        if num_tokens > self.max_model_len or row >= self.num_slots:
            return None
        lease = Lease(row=row, capacity=num_tokens)
        self._leases[row] = lease
        self._num_used = max(self._num_used, row + 1)
        for table in self._tables:
            table.append(row, [row])
        return lease

    def reserve(self, lease: Lease, num_tokens: int) -> bool:
        if num_tokens > self.max_model_len:
            return False
        lease.capacity = max(lease.capacity, num_tokens)
        return True

    def commit_rows(
        self, leases: Sequence[Lease], token_ids: np.ndarray, num_tokens: np.ndarray
    ) -> None:
        """Does nothing, because slots are not shared."""

    def release(self, lease: Lease) -> None:
        if lease.released or self._leases.get(lease.row) is not lease:
            raise InternalError(f"the lease of row {lease.row} is released twice")
        lease.released = True
        del self._leases[lease.row]
        for table in self._tables:
            table.reset(lease.row)

    def write_table(self, group: str, leases: Sequence[Lease], table: np.ndarray) -> None:
        table[:] = 0
        slots = np.asarray([lease.row for lease in leases], np.int32)
        num_pages = 1 if group in self.states else self.pages_per_slot
        offsets = np.arange(min(num_pages, table.shape[1]), dtype=np.int32)
        table[: len(leases), : len(offsets)] = slots[:, None] * num_pages + offsets

    def free_pages(self) -> Mapping[str, np.ndarray]:
        free = np.setdiff1d(np.arange(self._num_used, dtype=np.int32), list(self._leases))
        self._num_used = max(self._leases, default=-1) + 1
        offsets = np.arange(self.pages_per_slot, dtype=np.int32)
        own = (free[:, None] * self.pages_per_slot + offsets).ravel()
        return {**dict.fromkeys(self.windows, own), **dict.fromkeys(self.states, free)}

    def resized(self, shapes: Mapping[str, CacheShape]) -> None:
        self.pages_per_slot = next(iter(shapes.values())).pages_per_slot

    def check(self) -> None:
        for row, lease in self._leases.items():
            if lease.row != row or lease.released or lease.capacity > self.max_model_len:
                raise InternalError(f"the ledger is inconsistent at row {row}: {lease}")

    @property
    def num_free_tokens(self) -> int:
        return (self.num_slots - len(self._leases)) * self.max_model_len
