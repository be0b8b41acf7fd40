"""StepKey: identifies a compiled step, and decides which other steps its program can serve."""

from __future__ import annotations

import dataclasses
from typing import Literal

from enginebay.ops.spec import Bucket
from enginebay.types import StepVariant

Kind = Literal["prefill", "decode", "compact", "verify", "forward", "sample"]
"""A prefill is compiled as "forward" and "sample" programs; see `enginebay_runtime.programs`."""


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
    that accepts embeddings. `adapts`: whether rows may have adapters.
    """

    kind: Kind
    bucket: Bucket
    variant: StepVariant = StepVariant.FULL
    full_vocab: bool = False
    names: frozenset[str] | None = None
    pools: bool = False
    embeds: bool = False
    adapts: bool = False

    def __str__(self) -> str:
        b = self.bucket
        number, what = (b.tokens, "token") if self.kind == "prefill" else (b.seqs, "row")
        size = f"{number} {what}{'s' * (number != 1)}"
        variant = "" if self.variant is StepVariant.FULL else f", {self.variant.name.lower()}"
        full_vocab = ", full-vocabulary log-probabilities" if self.full_vocab else ""
        more = ", hidden states" * self.pools + ", embeddings" * self.embeds
        more += ", adapters" * self.adapts
        return f"{self.kind} {size}, {b.mode}, context {b.max_kv_len}{variant}{full_vocab}{more}"
