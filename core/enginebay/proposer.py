"""The proposer contract: which tokens a row may have next, guessed on the host so that one step can
verify several.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

MAX_VERIFIED_ROWS = 8
"""A step verifies the drafts of so many rows at most. While more rows run, none speculates: a step
of many rows is busy with arithmetic, and drafts would make more of it.
"""


class Proposer(ABC):
    """Guesses how a row goes on. What a plugin registers as kind "proposer": made with its options,
    once for a loop.

    Invariants (held by the conformance suite): equal arguments give equal drafts, whatever was
    asked before; `token_ids` is not changed; every draft is a token of the vocabulary. A wrong
    draft costs time and never changes a token: the model's own tokens are what a row gets.
    """

    looks_far: bool = False
    """Whether a hundred drafts cost hardly more than a few: then as many are asked for as several
    passes of the model verify, the later of which are only looked at when all before them hold.
    """

    @abstractmethod
    def propose(self, token_ids: np.ndarray, most: int) -> np.ndarray:
        """int32 [n], n from 0 to `most` (at least 1): the tokens after token_ids int32 [length],
        prompt and output so far.

        Called on the loop's thread between steps, for one row at a time: it must be quick.
        """
