"""The contract of constraints: grammars that a request's output keeps to, compiled and followed on
the host.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod

import numpy as np

from enginebay.grammar import Grammar, Structure
from enginebay.text import Tokenizer

GUIDED, BITS = "guided", "bits"
"""The logits processor that leaves a row the tokens of a mask, and its only field: uint32
[num_words(vocabulary)].
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of one model: its tokenizer, how many logits it gives, and which ids end a
    sequence.

    Ids that the tokenizer does not know (a vocabulary may be padded) are never allowed.
    """

    tokenizer: Tokenizer
    size: int
    eos_token_ids: tuple[int, ...]


class GrammarLibrary(ABC):
    """What a plugin registers as kind "grammar": made with a Vocabulary, and its options if it has
    any, at an engine's first guided request.

    UnsupportedError when it cannot be made for this tokenizer. Safe from several threads. It is
    made in a worker process too, where each structure is compiled first (see
    `enginebay.compose.guarded`): there the tokenizer's `inner` has `backend_tokenizer`, encode and
    decode alone. Importing its module must not import JAX.
    """

    @abstractmethod
    def compile(self, structure: Structure) -> Grammar:
        """RequestError with the library's reason for what is malformed, matches nothing, or cannot
        be held to its end.

        What the library would not hold is refused: nothing of a structure is ever left out
        silently.
        """


def num_words(vocab_size: int) -> int:
    """Words of a mask."""
    return -(-vocab_size // 32)


def with_tokens(bits: np.ndarray, token_ids: tuple[int, ...]) -> np.ndarray:
    """A copy of a mask in which these tokens are allowed too."""
    ids = np.asarray(token_ids, np.int64)
    more = bits.copy()
    np.bitwise_or.at(more, ids // 32, np.left_shift(np.uint32(1), (ids % 32).astype(np.uint32)))
    return more
