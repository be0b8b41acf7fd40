"""Sizes of the contiguous engine: how large the cache must be, and which bucket a step falls into."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from enginebay.cache import CacheGroup, KVLayout
from enginebay.ops.spec import Bucket
from enginebay.runner.buckets import BucketSizes, round_up
from enginebay.runner.keys import StepKey
from enginebay.runner.parts import StepFacts
from enginebay.runner.verify import verify_bucket
from enginebay_vinference.grow import SlotShape

ONE_PAGE_LAYOUTS = ("hnd",)
"""Layouts in which a slot is a single page: their kernels take pages of any size."""


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Pure functions of an engine's bucket sizes, its layout and whether it decodes on compact
    copies.
    """

    sizes: BucketSizes
    layout_type: type[KVLayout]
    layout: str
    page_size: int
    compact_decode: bool
    num_drafts: int = 0
    """Drafts of a row that one pass of the model verifies at most; 0: steps verify none."""

    def shape_for(self, num_rows: int, num_tokens: int) -> SlotShape:
        """The smallest cache with room for `num_rows` rows of `num_tokens` tokens."""
        return self.exact_shape(
            round_up(self.sizes.decode_rows, num_rows), round_up(self.sizes.kv_lens, num_tokens)
        )

    def exact_shape(self, num_slots: int, capacity: int) -> SlotShape:
        """A cache of this many slots of at least `capacity` tokens."""
        if self.layout in ONE_PAGE_LAYOUTS:
            return SlotShape(num_slots, 1, capacity)
        page_size = min(self.page_size, capacity)
        return SlotShape(num_slots, -(-capacity // page_size), page_size)

    @property
    def largest(self) -> SlotShape:
        """The cache at its full size."""
        return self.shape_for(self.sizes.decode_rows[-1], self.sizes.kv_lens[-1])

    def layouts(
        self, shape: SlotShape, groups: tuple[CacheGroup, ...], dtype: str
    ) -> Mapping[str, KVLayout]:
        """Each group's layout at a size."""
        pages = shape.num_slots * shape.pages_per_slot
        return {
            g.name: self.layout_type(pages, shape.page_size, g.num_kv_heads, g.head_dim, dtype)
            for g in groups
        }

    def prefill_bucket(
        self, shape: SlotShape, num_rows: int, num_tokens: int, *, no_prefix: bool
    ) -> Bucket:
        """`no_prefix`: no row has a prefix. Rows with one come in one context length only: the slots'
        own.
        """
        seqs = round_up(self.sizes.prefill_rows, num_rows)
        # the rarer shapes come in every other size only: fewer programs for a little more padding
        common = seqs == 1 and no_prefix
        tokens = round_up(
            self.sizes.prefill_tokens if common else self.sizes.prefill_tokens[::-2][::-1],
            num_tokens,
        )
        if no_prefix:
            return Bucket(
                tokens, seqs, shape.pages_per_slot, tokens, min(tokens, shape.capacity), "prefill"
            )
        return Bucket(tokens, seqs, shape.pages_per_slot, tokens, shape.capacity, "mixed")

    def decode_bucket(self, shape: SlotShape, num_rows: int, longest: int) -> StepKey:
        """The program that decodes `num_rows` rows of up to `longest` tokens.

        All slots at their full length are used as they lie. Otherwise the rows are copied first,
        where that was asked for, or reached through the page tables.
        """
        seqs = round_up(self.sizes.decode_rows, num_rows)
        kv_len = min(round_up(self.sizes.kv_lens, longest), shape.capacity)
        whole = seqs == shape.num_slots and kv_len == shape.capacity and shape.pages_per_slot == 1
        bucket = Bucket(seqs, seqs, shape.pages_per_slot, 1, kv_len, "decode", rows_are_pages=whole)
        return StepKey("compact" if self.compact_decode and not whole else "decode", bucket)

    def verify_key(self, shape: SlotShape, num_rows: int) -> StepKey:
        """The program that verifies the drafts of `num_rows` rows, in one context length only: the
        slots' own.
        """
        seqs = round_up(self.sizes.verify_rows, num_rows)
        return StepKey(
            "verify", verify_bucket(seqs, self.num_drafts, shape.pages_per_slot, shape.capacity)
        )

    def all_steps(self) -> list[StepKey]:
        """Every program that a cache at its full size can need."""
        return self.steps_at(self.largest)

    def steps_at(self, shape: SlotShape) -> list[StepKey]:
        """Every program that a cache of a shape can need."""
        sizes = self.sizes
        keys: dict[StepKey, None] = {}
        for num_rows in sizes.decode_rows:
            keys |= dict.fromkeys(
                self.decode_bucket(shape, num_rows, kv_len) for kv_len in sizes.kv_lens
            )
        for num_rows in sizes.prefill_rows:
            for num_tokens in sizes.prefill_tokens:
                for no_prefix in (True, False):
                    keys[
                        StepKey(
                            "prefill",
                            self.prefill_bucket(shape, num_rows, num_tokens, no_prefix=no_prefix),
                        )
                    ] = None
        if self.num_drafts:
            keys |= dict.fromkeys(
                self.verify_key(shape, num_rows) for num_rows in sizes.verify_rows
            )
        return list(keys)


def make_geometry(facts: StepFacts, page_size: int) -> Geometry:
    """The geometry of an engine with the usual sizes of steps."""
    return Geometry(
        facts.sizes,
        facts.layout_type,
        facts.layout,
        page_size,
        facts.compact_decode,
        facts.config.max_drafts,
    )
