"""StepKey: identifies a compiled step, and decides which other steps its program can serve."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from enginebay.cache import KVLayout
from enginebay.engine import AttentionProblem
from enginebay.ops.spec import Bucket
from enginebay.types import StepVariant

Kind = Literal["prefill", "decode", "compact", "verify", "forward", "sample"]
"""A prefill is compiled as "forward" and "sample" programs; see `enginebay_executor.programs`."""


def draft_rows(bucket: Bucket) -> Bucket:
    """The shapes of a verify step that decodes each draft as a row of its own."""
    return dataclasses.replace(bucket, seqs=bucket.tokens, max_q_len=1, mode="decode")


@dataclasses.dataclass(frozen=True, slots=True)
class StepNeeds:
    """The smallest variant that serves a step's rows and, for FULL, the logits processors that they
    use.
    """

    variant: StepVariant
    names: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class StepKey:
    """Identifies one compiled step. The kind "compact" decodes on a compact copy of the rows'
    cache.

    `full_vocab`: whether the step also returns log-probabilities of the whole vocabulary; a decode
    step then makes one token per row. `names`: the logits processors of the step; None: all of the
    engine's. `pools`: a prefill that returns pooled hidden states of each row. `embeds`: a prefill
    that accepts embeddings.
    """

    kind: Kind
    bucket: Bucket
    variant: StepVariant = StepVariant.FULL
    full_vocab: bool = False
    names: frozenset[str] | None = None
    pools: bool = False
    embeds: bool = False

    def __str__(self) -> str:
        b = self.bucket
        size = f"{b.tokens} tokens" if self.kind == "prefill" else f"{b.seqs} rows"
        variant = "" if self.variant is StepVariant.FULL else f", {self.variant.name.lower()}"
        full_vocab = ", full-vocabulary log-probabilities" if self.full_vocab else ""
        pools = ", hidden states" * self.pools + ", embeddings" * self.embeds
        return f"{self.kind} {size}, {b.mode}, context {b.max_kv_len}{variant}{full_vocab}{pools}"

    def attention(
        self, layouts: Mapping[str, KVLayout], *, by_rows: bool = False
    ) -> AttentionProblem:
        """The bucket and the layouts that its attention sees: those of the compact copy, if it
        makes one. `by_rows`: a verify step sees each draft as a row.
        """
        if self.kind != "compact":
            return draft_rows(
                self.bucket
            ) if by_rows and self.kind == "verify" else self.bucket, layouts
        rows, length = self.bucket.seqs, self.bucket.max_kv_len
        small = {
            name: layout.resized(num_pages=rows, page_size=length)
            for name, layout in layouts.items()
        }
        return replace(self.bucket, rows_are_pages=True, pages_per_seq=1), small
