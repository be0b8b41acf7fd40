"""Geometry: the bucket of each step. CacheSizes: the size of the cache, and how it grows."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from enginebay.contracts.cache import KVLayout, Lease, Ledger
from enginebay.contracts.cache_shape import CacheShape, pages_for
from enginebay.contracts.engine import AttentionProblem, Demand
from enginebay.contracts.executor import EngineParts, make_layouts
from enginebay.contracts.step_key import StepKey, draft_rows
from enginebay.ops.spec import Bucket
from enginebay_runtime.buckets import BucketSizes, bucket_sizes, smallest_fit

Shapes = Mapping[str, CacheShape]
"""The sizes of a cache's arrays, by group."""


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Which program a step uses, over a cache of one size.

    A step's page table is as wide as its longest context needs.
    """

    sizes: BucketSizes
    page_size: int
    capacity: int
    """The largest number of tokens per row."""
    compact_decode: bool
    num_drafts: int = 0
    """The largest number of drafts per row that one pass of the model verifies; 0: no verify
    steps.
    """
    num_slots: int | None = None
    """Row i owns the i-th of this many equal runs of pages; None: rows share the pages."""

    def prefill_bucket(self, num_rows: int, num_tokens: int, *, no_prefix: bool) -> Bucket:
        """The bucket of a prefill. `no_prefix`: no row has a prefix. Rows with a prefix have one
        context length only, the longest.
        """
        # With a prefix cache, short rests of prompts are common: coarse sizes would waste half of
        # what the cache saves.
        seqs, tokens, no_prefix = self.sizes.prefill_shape(
            num_rows,
            num_tokens,
            no_prefix=no_prefix,
            is_rare=not no_prefix and self.num_slots is not None,
        )
        kv_len = min(tokens, self.capacity) if no_prefix else self.capacity
        pages = pages_for(kv_len, self.page_size)
        return Bucket(tokens, seqs, pages, tokens, kv_len, "prefill" if no_prefix else "mixed")

    def decode_key(self, num_rows: int, longest: int) -> StepKey:
        """The program that decodes `num_rows` rows of up to `longest` tokens.

        When all slots decode at full length, attention reads the cache in place. Otherwise the rows
        are first copied (compact_decode), or read through page tables.
        """
        seqs = smallest_fit(self.sizes.decode_rows, num_rows)
        kv_len = min(smallest_fit(self.sizes.kv_lens, min(longest, self.capacity)), self.capacity)
        pages = pages_for(kv_len, self.page_size)
        whole = seqs == self.num_slots and kv_len == self.capacity and pages == 1
        bucket = Bucket(seqs, seqs, pages, 1, kv_len, "decode", rows_are_pages=whole)
        return StepKey("compact" if self.compact_decode and not whole else "decode", bucket)

    def verify_key(self, num_rows: int) -> StepKey:
        """The program that verifies drafts of `num_rows` rows. It has one context length only, the
        longest.
        """
        seqs = smallest_fit(self.sizes.verify_rows, num_rows)
        pages, width = pages_for(self.capacity, self.page_size), self.num_drafts + 1
        return StepKey("verify", Bucket(seqs * width, seqs, pages, width, self.capacity, "mixed"))

    def row_sizes(self, *, verifies: bool) -> list[int]:
        """The numbers of rows of decode or verify steps, largest first."""
        return sorted(self.sizes.verify_rows if verifies else self.sizes.decode_rows, reverse=True)

    def prefill_sizes(self) -> list[tuple[int, int]]:
        """The (rows, tokens) of prefills, largest first."""
        sizes = self.sizes
        return [(r, t) for t in sizes.prefill_tokens[::-1] for r in sizes.prefill_rows[::-1]]

    def all_steps(self) -> list[StepKey]:
        """Every program that serving can need."""
        sizes = self.sizes
        keys = [self.decode_key(rows, kv) for rows in sizes.decode_rows for kv in sizes.kv_lens]
        keys += [
            StepKey("prefill", self.prefill_bucket(num_rows, num_tokens, no_prefix=no_prefix))
            for num_rows in sizes.prefill_rows
            for num_tokens in sizes.prefill_tokens
            for no_prefix in (True, False)
        ]
        if self.num_drafts:
            keys += [self.verify_key(num_rows) for num_rows in sizes.verify_rows]
        return list(dict.fromkeys(keys))

    def problems(
        self, layouts: Mapping[str, KVLayout], *, drafts_are_rows: bool
    ) -> list[AttentionProblem]:
        """The attention problems of these steps, over a cache of these layouts."""
        return [_attention(key, layouts, by_rows=drafts_are_rows) for key in self.all_steps()]


def _attention(key: StepKey, layouts: Mapping[str, KVLayout], *, by_rows: bool) -> AttentionProblem:
    """The bucket and the layouts that a step's attention sees: those of the compact copy, if the
    step makes one. `by_rows`: a verify step sees each draft as a row.
    """
    if key.kind == "verify" and by_rows:
        return draft_rows(key.bucket), layouts
    if key.kind != "compact":
        return key.bucket, layouts
    rows, length = key.bucket.seqs, key.bucket.max_kv_len
    small = {
        name: layout.resized(num_pages=rows, page_size=length) for name, layout in layouts.items()
    }
    return dataclasses.replace(key.bucket, rows_are_pages=True, pages_per_seq=1), small


@dataclasses.dataclass(frozen=True)
class CacheSizes(ABC):
    """The first and the largest size of a cache, and when it grows.

    Where allocation clears memory, as on a CPU, a large cache takes seconds: a short-lived service
    need not wait for it. Each size has programs of its own.
    """

    steps: BucketSizes
    page_size: int
    compact_decode: bool
    num_drafts: int
    first: Shapes
    whole: Shapes

    @abstractmethod
    def geometry(self, shapes: Shapes) -> Geometry:
        """The steps that run while the cache has the size `shapes`."""

    @abstractmethod
    def wanted(
        self, shapes: Shapes, leases: Sequence[Lease], demand: Demand, ledger: Ledger
    ) -> Shapes:
        """The size that the cache needs for a step of these leases. `shapes`: its present size."""


@dataclasses.dataclass(frozen=True)
class PoolSizes(CacheSizes):
    """Rows share pools of pages. The cache grows once, from its first size to the whole."""

    @staticmethod
    def of(parts: EngineParts, page_size: int, shapes: Shapes) -> PoolSizes:
        """The sizes of pools that are allocated whole."""
        drafts = parts.config.max_drafts
        return PoolSizes(
            bucket_sizes(parts), page_size, parts.compact_decode, drafts, shapes, shapes
        )

    def geometry(self, shapes: Shapes) -> Geometry:
        longest = self.steps.kv_lens[-1]
        return Geometry(self.steps, self.page_size, longest, self.compact_decode, self.num_drafts)

    def wanted(
        self, shapes: Shapes, leases: Sequence[Lease], demand: Demand, ledger: Ledger
    ) -> Shapes:
        if shapes == self.whole:
            return shapes
        most = 1 + demand.num_rows * pages_for(demand.num_tokens_per_row, self.page_size)
        for group, num_pages in ledger.reach.items():
            if max(num_pages, min(most, self.whole[group].num_pages)) > shapes[group].num_pages:
                return self.whole
        return shapes


def pool_problems(parts: EngineParts, page_size: int, shapes: Shapes) -> list[AttentionProblem]:
    """The attention problems of an engine whose pools have these sizes."""
    layouts = make_layouts(parts.info.attention, parts.layout_type, shapes)
    geometry = PoolSizes.of(parts, page_size, shapes).geometry(shapes)
    return geometry.problems(layouts, drafts_are_rows=parts.drafts_are_rows)
