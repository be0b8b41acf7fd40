"""Speculation: when to draft a row's next tokens, and how many drafts were accepted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from enginebay.config import EngineConfig
from enginebay.contracts.engine import StepPlan
from enginebay.contracts.proposer import Proposer
from enginebay.contracts.rows import EngineRows
from enginebay.errors import InternalError
from enginebay.serving.running import Running
from enginebay.types import FrozenSampling

STEPS_BETWEEN = 6
"""After an empty proposal, the proposer is asked again after at most this many decode steps of the
row. Text that repeats except for one word matches again a few tokens later: 6 is the fastest for
copying the demo model's stories.
"""


def can_speculate(sampling: FrozenSampling) -> bool:
    """Whether verifying drafts gives exactly the tokens that decoding would.

    It does not with penalties and logits processors, which may look at drafts; with grammars, which
    have a mask for one token only; and with full-vocabulary log-probabilities, which are returned
    for one token at a time.
    """
    return not (sampling.penalises or sampling.processors or sampling.returns_all)


def _pays(tracked: Running) -> bool:
    """Whether to draft the next tokens of a row."""
    return tracked.draft_stats.is_good and can_speculate(tracked.request.sampling)


class Speculation:
    """Asks a proposer for drafts, and updates the DraftStats of each row. Belongs to the loop's
    thread.
    """

    def __init__(self, proposer: Proposer, config: EngineConfig, table: EngineRows) -> None:
        self.proposer = proposer
        self.most = config.max_drafts
        self.passes = config.draft_passes
        self.table = table

    @property
    def width(self) -> int:
        """Tokens of a row in one pass of the model: its last token and the drafts."""
        return self.most + 1

    def waits(self, tracked: Running) -> bool:
        """Whether a row waits until its last token is read: drafts continue tokens that the host
        knows.
        """
        return tracked.num_launched > len(tracked.output) and _pays(tracked)

    def drafts(self, tracked: Running) -> tuple[int, ...]:
        """Drafts of a row's next tokens, whose earlier tokens are all read. Empty when drafting
        does not pay, or the drafts could not be verified.
        """
        far = self.passes * self.width - 1 if self.proposer.looks_far else self.most
        most = min(far, tracked.num_new_left - 1)
        if most < 1 or tracked.num_launched > len(tracked.output) or not _pays(tracked):
            return ()
        drafts = self._proposed(self._tokens(tracked), most)
        if not len(drafts):
            tracked.draft_stats = tracked.draft_stats.after_none()
        return tuple(drafts.tolist())

    def fewer_steps(self, rows: Sequence[Running], steps: int) -> int:
        """How many steps to decode rows without drafts: at most STEPS_BETWEEN when drafting may pay
        for all of them afterwards.
        """
        return min(steps, STEPS_BETWEEN) if all(map(_pays, rows)) else steps

    def verified(self, plan: StepPlan, num_new: Sequence[int]) -> list[int]:
        """How many drafts of each row were verified by a step that produced num_new[i] tokens for
        row i. A step makes its next pass only when all drafts of the pass before were accepted.
        """
        passes = max((-(-new // self.width) for new in num_new), default=0)
        most = max(0, passes * self.width - 1)
        return [min(len(row.draft_token_ids), most) for row in plan.rows]

    def learn(self, tracked: Running, num_drafts: int, num_new: int) -> None:
        """Update a row's stats after a step: from its `num_drafts` verified drafts, or from
        `num_new` tokens that it decoded without drafts, which show what drafts would have been
        worth.

        A step with neither teaches nothing: a chunk that is prefilled again after a preemption.
        """
        if num_drafts:
            accepted = num_new - 1
            tracked.metrics.num_draft_tokens += num_drafts
            tracked.metrics.num_accepted_tokens += accepted
            tracked.num_launched = len(tracked.output)  # rejected drafts were launched too
            tracked.draft_stats = tracked.draft_stats.after(accepted, num_drafts, self.most)
        elif (
            num_new
            and not (tracked.finished or tracked.draft_stats.is_good)
            and can_speculate(tracked.request.sampling)
        ):
            most = min(self.most, num_new)
            tokens = self._tokens(tracked)
            drafts = self._proposed(tokens[:-most], most)
            wrong = np.flatnonzero(drafts != tokens[len(tokens) - most :][: len(drafts)])
            accepted = int(wrong[0]) if len(wrong) else len(drafts)
            tracked.draft_stats = tracked.draft_stats.after(accepted, most, self.most)

    def _tokens(self, tracked: Running) -> np.ndarray:
        """The tokens of a running row that the host has read, after its last prompt embedding."""
        row, embeds = tracked.row_lease.row, tracked.request.embeds
        first = 0 if embeds is None else int(embeds.positions[-1]) + 1
        return self.table.token_ids[row, first : self.table.num_tokens[row]]

    def _proposed(self, token_ids: np.ndarray, most: int) -> np.ndarray:
        drafts = self.proposer.propose(token_ids, most)
        if len(drafts) > most or ((drafts < 0) | (drafts >= self.table.vocab_size)).any():
            raise InternalError(
                f"{type(self.proposer).__name__} proposes {drafts.tolist()}",
                f"at most {most} token ids, each from 0 to {self.table.vocab_size - 1}",
                "Fix the proposer, or pass another --proposer.",
            )
        return drafts
