"""Helpers for tests of speculative decoding: proposers that know the right tokens, and counters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from enginebay import SamplingParams
from enginebay.contracts.proposer import Proposer
from enginebay.outputs import RequestOutput
from enginebay.serving.observer import Ending, Execution, Observer, Update
from tests.unit.replaceable_parts import Changing

DRAFTS = 4


class Oracle(Proposer):
    """Drafts the continuations in `known`; every `wrong_every`-th token is replaced by a wrong one.

    For a row that is not in `known` it drafts token 1.
    """

    def __init__(self, known: Sequence[list[int]] = (), wrong_every: int = 0) -> None:
        self.known = known
        self.wrong_every = wrong_every
        self.num_asked = 0

    def propose(self, token_ids: np.ndarray, most: int) -> np.ndarray:
        self.num_asked += 1
        length = len(token_ids)
        for one in self.known:
            if one[:length] == token_ids.tolist():
                drafts = np.asarray(one[length : length + most], np.int32)
                wrong = (np.arange(length, length + len(drafts)) % max(1, self.wrong_every)) == 0
                return np.where(wrong & (self.wrong_every > 0), (drafts + 1) % 90, drafts).astype(
                    np.int32
                )
        return np.ones(most, np.int32)


class FarOracle(Oracle):
    """An oracle that the loop asks for the drafts of several passes at once."""

    looks_far = True


class Constant(Proposer):
    """Always drafts the same token."""

    def __init__(self, token_id: int) -> None:
        self.token_id = token_id

    def propose(self, token_ids: np.ndarray, most: int) -> np.ndarray:
        return np.full(most, self.token_id, np.int32)


class Counts(Observer):
    """Counts preemptions, draft tokens and accepted draft tokens."""

    def __init__(self) -> None:
        self.num_preempted = self.num_drafted = self.num_accepted = 0

    def updated(self, update: Update) -> None:
        self.num_preempted += update.num_preempted

    def executed(self, execution: Execution) -> None:
        self.num_drafted += execution.num_draft_tokens
        self.num_accepted += execution.num_accepted_tokens

    def ended(self, ending: Ending) -> None:
        pass


def run(
    made: Changing, prompts: Sequence[list[int]], params: SamplingParams, proposer: Proposer | None
) -> list[RequestOutput]:
    with made.drafted(proposer):
        return made.llm.generate(list(prompts), params)


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def plain_and_known(
    made: Changing, prompts: Sequence[list[int]], params: SamplingParams
) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens decoded without drafts, and each prompt with its tokens, for Oracle's `known`."""
    plain = tokens_of(run(made, prompts, params, None))
    return plain, [prompt + new for prompt, new in zip(prompts, plain, strict=True)]
