"""The contract of constraints: grammars that a request's output keeps to, compiled and followed on
the host.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import Literal

import numpy as np

from enginebay.text import Tokenizer

GUIDED, BITS = "guided", "bits"
"""The logits processor that leaves a row the tokens of a mask, and its only field: uint32
[num_words(vocabulary)].
"""

Form = Literal["json_schema", "json_object", "regex", "choice", "grammar"]


@dataclasses.dataclass(frozen=True, slots=True)
class Structure:
    """What an output must be. `text` is a JSON schema, a regular expression, a JSON list of texts,
    or a grammar.
    """

    form: Form
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of one model: its tokenizer, how many logits it gives, and which ids end a
    sequence.

    Ids that the tokenizer does not know (a vocabulary may be padded) are never allowed.
    """

    tokenizer: Tokenizer
    size: int
    eos_token_ids: tuple[int, ...]


class Constraint(ABC):
    """How far one completion has come in its grammar; used by one thread at a time.

    Any method may raise RequestError, for a grammar that is too complex to be followed: then the
    request ends with it.
    """

    @abstractmethod
    def bits(self) -> np.ndarray:
        """uint32 [num_words(size)]: bit i % 32 of word i // 32 says whether token i may come next,
        never for an end of sequence.

        Nobody changes it: it may be read until long after. RequestError when the text can neither
        go on nor end.
        """

    @abstractmethod
    def accept(self, token_id: int) -> None:
        """Go on behind a token. RequestError for one that `bits` does not allow."""

    @property
    @abstractmethod
    def may_end(self) -> bool:
        """Whether the text so far is all that the grammar asks for."""

    @property
    def is_done(self) -> bool:
        """Whether the text can only end."""
        return not self.bits().any() and self.may_end


class Grammar(ABC):
    """A compiled structure. Safe from several threads; each completion has a Constraint of its own."""

    @abstractmethod
    def start(self) -> Constraint:
        """A constraint at the beginning, whose first mask is computed already."""


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
