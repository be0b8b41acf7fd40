"""DraftStats: whether drafting a row's tokens has paid so far. A pure function of what became of
its drafts.
"""

from __future__ import annotations

import dataclasses

ENOUGH = 0.3
"""The share of the drafts asked for that must hold. A step that verifies costs more than one that
decodes, and its tokens must be read before the next is launched.
"""

WEIGHT = 0.5
"""Of the last proposal, when one pass or more was full of it."""

WEIGHT_OF_NONE = 0.125
"""Of a proposal of nothing: it cost no step that verifies, only that the row waited."""


@dataclasses.dataclass(frozen=True, slots=True)
class DraftStats:
    """The share of drafts that held, the latest of which count most.

    A row begins with the benefit of the doubt. When nothing is proposed, or too little of it holds,
    the row decodes as usual; of its tokens it is then seen what the proposer would have been worth,
    until that is enough.
    """

    share: float = 0.5

    @property
    def is_good(self) -> bool:
        """Whether the next tokens are to be drafted."""
        return self.share >= ENOUGH

    def after(self, num_held: int, num_asked: int, most: int) -> DraftStats:
        """The stats after `num_held` of so many drafts asked for have held; one pass of the model
        verifies `most`.
        """
        weight = WEIGHT * min(1.0, num_asked / most)
        return DraftStats(self.share + weight * (num_held / num_asked - self.share))

    def after_none(self) -> DraftStats:
        """The stats after a step for which nothing was proposed."""
        return DraftStats(self.share * (1 - WEIGHT_OF_NONE))
