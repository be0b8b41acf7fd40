"""Sizes of the paged engine's steps: which bucket a plan falls into, and which there are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from enginebay.cache import CacheGroup, KVLayout
from enginebay.ops.spec import Bucket
from enginebay.runner.buckets import BucketSizes, round_up
from enginebay.runner.keys import StepKey
from enginebay.runner.parts import StepFacts
from enginebay.runner.verify import verify_bucket
from enginebay_oengine.pool import pages_for


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Pure functions of an engine's bucket sizes, its pages and whether it decodes on compact
    copies.

    A step's page table is as wide as its longest context needs, in every group.
    """

    sizes: BucketSizes
    layout_type: type[KVLayout]
    page_size: int
    compact_decode: bool
    num_drafts: int = 0
    """Drafts of a row that one pass of the model verifies at most; 0: steps verify none."""
    max_ahead: int | None = None
    """How many tokens launched steps may put into the cache after those that the host has read;
    None: rows keep their pages, in groups with a window too.
    """

    def row_pages(self, window: int | None) -> int:
        """Pages that a row has at most in a cache group with this window."""
        whole = pages_for(self.max_model_len, self.page_size)
        if window is None or self.max_ahead is None:
            return whole
        return min(whole, pages_for(window + self.max_ahead, self.page_size) + 1)

    def kept_window(self, group: CacheGroup) -> int | None:
        """The window of a group whose rows give pages back; None where they keep all: a window that
        no row outgrows saves nothing.
        """
        saves = self.row_pages(group.window) < self.row_pages(None)
        return group.window if saves else None

    def pool_pages(
        self, num_pages: int, groups: tuple[CacheGroup, ...], num_rows: int
    ) -> dict[str, int]:
        """Pages of each group: `num_pages` where rows keep all of theirs; otherwise as many as
        `num_rows` rows can have, and the dummy.
        """
        return {
            g.name: num_pages
            if self.kept_window(g) is None
            else 1 + num_rows * self.row_pages(g.window)
            for g in groups
        }

    @property
    def max_model_len(self) -> int:
        """The longest context."""
        return self.sizes.kv_lens[-1]

    def layouts(
        self, num_pages: Mapping[str, int], groups: tuple[CacheGroup, ...], dtype: str
    ) -> Mapping[str, KVLayout]:
        """Each group's layout of a cache with so many pages by group; a page has the same number of
        tokens in every group.
        """
        return {
            g.name: self.layout_type(
                num_pages[g.name], self.page_size, g.num_kv_heads, g.head_dim, dtype
            )
            for g in groups
        }

    def prefill_bucket(self, num_rows: int, num_tokens: int, *, no_prefix: bool) -> Bucket:
        """`no_prefix`: no row has a prefix. Rows with one come in one context length only, the longest."""
        seqs = round_up(self.sizes.prefill_rows, num_rows)
        # A step of many rows comes in every other size only: fewer programs for a little more
        # padding. One row does not: what is left of a prompt whose beginning was found would lose
        # half of what that saves.
        sizes = self.sizes.prefill_tokens
        tokens = round_up(sizes if seqs == 1 else sizes[::-2][::-1], num_tokens)
        kv_len = min(tokens, self.max_model_len) if no_prefix else self.max_model_len
        pages = pages_for(kv_len, self.page_size)
        return Bucket(tokens, seqs, pages, tokens, kv_len, "prefill" if no_prefix else "mixed")

    def decode_key(self, num_rows: int, longest: int) -> StepKey:
        """The program that decodes `num_rows` rows of up to `longest` tokens."""
        seqs = round_up(self.sizes.decode_rows, num_rows)
        kv_len = round_up(self.sizes.kv_lens, min(longest, self.max_model_len))
        bucket = Bucket(seqs, seqs, pages_for(kv_len, self.page_size), 1, kv_len, "decode")
        return StepKey("compact" if self.compact_decode else "decode", bucket)

    def verify_key(self, num_rows: int) -> StepKey:
        """The program that verifies the drafts of `num_rows` rows, in one context length only, the
        longest.
        """
        seqs = round_up(self.sizes.verify_rows, num_rows)
        pages = pages_for(self.max_model_len, self.page_size)
        return StepKey("verify", verify_bucket(seqs, self.num_drafts, pages, self.max_model_len))

    def all_steps(self) -> list[StepKey]:
        """Every program that serving can need."""
        sizes = self.sizes
        keys: dict[StepKey, None] = {}
        for num_rows in sizes.decode_rows:
            keys |= dict.fromkeys(self.decode_key(num_rows, kv_len) for kv_len in sizes.kv_lens)
        for num_rows in sizes.prefill_rows:
            for num_tokens in sizes.prefill_tokens:
                for no_prefix in (True, False):
                    keys[
                        StepKey(
                            "prefill",
                            self.prefill_bucket(num_rows, num_tokens, no_prefix=no_prefix),
                        )
                    ] = None
        if self.num_drafts:
            keys |= dict.fromkeys(self.verify_key(num_rows) for num_rows in sizes.verify_rows)
        return list(keys)


def make_geometry(facts: StepFacts, page_size: int) -> Geometry:
    """The geometry of an engine with the usual sizes of steps."""
    config = facts.config
    verified = config.draft_passes * (config.max_drafts + 1) if config.max_drafts else 0
    steps = max(config.decode_steps, verified)
    return Geometry(
        facts.sizes,
        facts.layout_type,
        page_size,
        facts.compact_decode,
        config.max_drafts,
        max(config.max_num_batched_tokens, steps) + steps,
    )
