"""DraftStats: whether drafting a row's tokens has paid so far. A pure function of past drafts."""

from __future__ import annotations

import dataclasses

ENOUGH = 0.3
"""The share of drafts that must be accepted. A verify step costs more than a decode step, and its
tokens must be read before the next step is launched.
"""

WEIGHT = 0.5
"""The weight of the last proposal, when it filled at least one pass of the model."""

WEIGHT_OF_NONE = 0.125
"""The weight of an empty proposal: it cost no verify step, only the wait for the row's last
token.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class DraftStats:
    """A moving average of the share of drafts that were accepted.

    It starts above ENOUGH, so every row begins with drafting. While it is below ENOUGH, or when
    nothing is proposed, the row decodes without drafts; the tokens that it decodes then show how
    many drafts would have been accepted, until the share is large enough again.
    """

    share: float = 0.5

    @property
    def is_good(self) -> bool:
        """Whether to draft the row's next tokens."""
        return self.share >= ENOUGH

    def after(self, num_held: int, num_asked: int, most: int) -> DraftStats:
        """The stats after `num_held` of `num_asked` requested drafts were accepted; one pass of the
        model verifies at most `most` drafts.
        """
        weight = WEIGHT * min(1.0, num_asked / most)
        return DraftStats(self.share + weight * (num_held / num_asked - self.share))

    def after_none(self) -> DraftStats:
        """The stats after the proposer has proposed nothing."""
        return DraftStats(self.share * (1 - WEIGHT_OF_NONE))
