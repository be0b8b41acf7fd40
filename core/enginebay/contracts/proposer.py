"""The proposer contract: a proposer drafts the next tokens of a row on the host, so that one step
can verify several tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

MAX_VERIFIED_ROWS = 8
"""Max rows of a verify step. While more rows run, no row gets drafts: a step of many rows is bound
by arithmetic, and verifying drafts would add to it.
"""


class Proposer(ABC):
    """Drafts the next tokens of a row. A plugin registers a subclass as kind "proposer"; each loop
    makes one proposer with the part's options.

    Invariants (tested by the conformance suite): the same arguments give the same drafts, whatever
    the earlier calls were; `token_ids` is not changed; every draft is a token of the vocabulary. A
    wrong draft costs time but never changes the output: a step only accepts drafts that equal the
    tokens the model itself would choose.
    """

    looks_far: bool = False
    """Whether a hundred drafts cost hardly more than a few. If so, `propose` is asked for enough
    drafts for several passes of the model; a later pass runs only when all drafts before it were
    accepted.
    """

    @abstractmethod
    def propose(self, token_ids: np.ndarray, most: int) -> np.ndarray:
        """Return draft tokens int32 [n], 0 <= n <= `most`, that may follow token_ids int32
        [length], which are the prompt and the output so far. `most` is at least 1.

        Called on the loop's thread between steps, for one row at a time, so it must be quick.
        """
