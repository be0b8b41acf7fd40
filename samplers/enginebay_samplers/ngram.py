"""Drafts by prompt lookup: the tokens that followed an earlier occurrence of the row's last tokens,
in its prompt or output.

Saxena, "Prompt Lookup Decoding", 2023; Yang et al., "Inference with Reference: Lossless
Acceleration of Large Language Models", 2023.
"""

from __future__ import annotations

from typing import Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from enginebay.contracts.proposer import Proposer


class NgramOptions(BaseModel):
    """Options of the proposer "ngram"."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    min_n: int = Field(
        default=2,
        ge=1,
        le=32,
        description="min number of the row's last tokens that are searched for in its "
        "earlier tokens",
    )
    max_n: int = Field(
        default=4,
        ge=1,
        le=32,
        description="max number of the row's last tokens that are searched for in its "
        "earlier tokens",
    )

    @model_validator(mode="after")
    def _least_is_not_more_than_most(self) -> Self:
        if self.min_n > self.max_n:
            raise ValueError(f"min_n = {self.min_n} is more than max_n = {self.max_n}")
        return self


class NgramProposer(Proposer):
    """Drafts the tokens after an earlier occurrence of the row's last min_n to max_n tokens.

    The longest occurrence counts; of equally long ones, the latest.
    """

    looks_far = True

    def __init__(self, options: NgramOptions) -> None:
        self.options = options

    def propose(self, token_ids: np.ndarray, most: int) -> np.ndarray:
        """Return at most `most` draft tokens, by one pass over the tokens and one over the matches.

        If fewer than `most` tokens follow the occurrence, they are repeated as a period.
        """
        nothing = np.empty(0, np.int32)
        last = len(token_ids) - 1
        if last < self.options.min_n:
            return nothing
        ends = np.flatnonzero(token_ids[:last] == token_ids[last])
        matched = 1
        while matched < self.options.max_n:
            longer = ends[ends >= matched]
            longer = longer[token_ids[longer - matched] == token_ids[last - matched]]
            if not len(longer):
                break
            ends, matched = longer, matched + 1
        if not len(ends) or matched < self.options.min_n:
            return nothing
        return np.resize(token_ids[ends[-1] + 1 :], most).astype(np.int32)
