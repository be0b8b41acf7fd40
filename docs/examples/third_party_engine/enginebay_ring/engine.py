"""The engine "ring". Each row owns a ring of blocks in every cache group, so no request is refused
or preempted for lack of memory. Layers with a window keep only the tokens of their window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from enginebay.config import EngineConfig
from enginebay.contracts.cache import CacheGroup, Lease, Ledger
from enginebay.contracts.cache_shape import CacheShape, pages_for
from enginebay.contracts.engine import AttentionProblem
from enginebay.contracts.executor import EngineParts
from enginebay.contracts.prefix_key import NO_KEY, PrefixKey
from enginebay.errors import InternalError
from enginebay_runtime.engine import StepEngine
from enginebay_runtime.geometry import PoolSizes, pool_problems
from enginebay_runtime.rows.make import make_row_table


class RingOptions(BaseModel):
    """Options of the engine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    block_size: int = Field(default=32, ge=8, le=256, multiple_of=8, description="tokens a block")


class RingLedger(Ledger):
    """Block i of a row's tokens is stored at index i % length of the row's ring.

    In a group with a window, the ring has room for the window and for the tokens that steps may
    write after it. Other rings never wrap. Page 0 stands for blocks that a row no longer keeps.
    """

    def __init__(self, groups: Sequence[CacheGroup], config: EngineConfig, block_size: int) -> None:
        assert config.max_model_len is not None, "the composition root resolves max_model_len"
        self.num_rows, self.max_model_len = config.max_num_seqs, config.max_model_len
        self.max_ahead, self.block_size = config.max_ahead, block_size
        whole = pages_for(self.max_model_len, block_size)
        self.windows: dict[str, int | None] = {}
        self.lengths: dict[str, int] = {}
        for group in groups:
            needed = whole
            if group.window is not None:
                needed = pages_for(group.window + self.max_ahead, block_size) + 1
            self.lengths[group.name] = min(whole, needed)
            self.windows[group.name] = group.window if needed < whole else None
        self.leases: dict[int, Lease] = {}
        self.committed = np.zeros(self.num_rows, np.int64)

    @property
    def num_free_tokens(self) -> int:
        return (self.num_rows - len(self.leases)) * self.max_model_len

    def shapes(self) -> dict[str, CacheShape]:
        """Return the size of each group's arrays."""
        return {
            group: CacheShape(1, 1 + self.num_rows * length, self.block_size)
            for group, length in self.lengths.items()
        }

    def admit(
        self, row: int, prompt_token_ids: np.ndarray, num_tokens: int, key: PrefixKey = NO_KEY
    ) -> Lease | None:
        if row in self.leases:
            raise InternalError(f"row {row} is admitted twice: release its lease first")
        if row >= self.num_rows or num_tokens > self.max_model_len:
            return None
        self.committed[row] = 0
        self.leases[row] = Lease(row=row, capacity=num_tokens)
        return self.leases[row]

    def reserve(self, lease: Lease, num_tokens: int) -> bool:
        if num_tokens > self.max_model_len:
            return False
        lease.capacity = max(lease.capacity, num_tokens)
        return True

    def release(self, lease: Lease) -> None:
        if self.leases.get(lease.row) is not lease:
            raise InternalError(f"the lease of row {lease.row} is released twice")
        del self.leases[lease.row]
        lease.released = True

    def commit(self, lease: Lease, token_ids: np.ndarray) -> None:
        self.committed[lease.row] = max(self.committed[lease.row], len(token_ids))

    def resume(self, lease: Lease, num_tokens: int) -> Mapping[str, np.ndarray]:
        self.committed[lease.row] = num_tokens
        return {}

    def write_table(self, group: str, leases: Sequence[Lease], table: np.ndarray) -> None:
        table[:] = 0
        window, length = self.windows[group], self.lengths[group]
        for entries, lease in zip(table, leases, strict=False):
            first, last = 0, lease.capacity
            if window is not None:
                committed = int(self.committed[lease.row])
                first = max(0, committed + 1 - window) // self.block_size
                last = min(last, committed + self.max_ahead)
            blocks = np.arange(first, min(pages_for(last, self.block_size), len(entries)))
            entries[blocks] = 1 + lease.row * length + blocks % length

    def check(self) -> None:
        for row, lease in self.leases.items():
            if lease.row != row or lease.released or lease.capacity > self.max_model_len:
                raise InternalError(f"the books are wrong at row {row}: {lease}")


def make_engine(parts: EngineParts, options: RingOptions) -> StepEngine:
    """Return a StepEngine with a RingLedger. All rings are allocated at the start."""
    ledger = RingLedger(parts.model.info.groups, parts.config, options.block_size)
    sizes = PoolSizes.of(parts, options.block_size, ledger.shapes())
    rows = make_row_table(parts, options.block_size)
    return StepEngine(parts, rows, ledger, sizes)


def attention_problems(parts: EngineParts, options: RingOptions) -> list[AttentionProblem]:
    """Return the attention problems of the engine's steps. Kernels are chosen by them."""
    shapes = RingLedger(parts.info.groups, parts.config, options.block_size).shapes()
    return pool_problems(parts, options.block_size, shapes)
