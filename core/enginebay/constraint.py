"""The contract of constraints: grammars that a request's output keeps to, compiled and followed on
the host.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from enginebay.grammar import Form, Grammar, Structure
from enginebay.text import Tokenizer
from enginebay.types import SamplingParams

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
    `enginebay_samplers.guides`): there the tokenizer's `inner` has `backend_tokenizer`, encode and
    decode alone. Importing its module must not import JAX.
    """

    @abstractmethod
    def compile(self, structure: Structure) -> Grammar:
        """RequestError with the library's reason for what is malformed, matches nothing, or cannot
        be held to its end.

        What the library would not hold is refused: nothing of a structure is ever left out
        silently.
        """


class Guide(ABC):
    """What makes grammars for the requests of one engine. Safe from several threads.

    A plugin registers, as kind "guide", a callable (`Registry`, `EngineConfig`) -> `MakeGuide`. It
    raises ConfigError for wrong options of the configuration.
    """

    @abstractmethod
    def grammar(self, params: SamplingParams) -> Grammar | None:
        """What the output of a request must be, or None when it may be anything. RequestError for
        what cannot be held.
        """

    @abstractmethod
    def close(self) -> None:
        """End what compiles and follows grammars. It starts again with the next constraint."""


MakeGuide = Callable[[Vocabulary], Guide]
"""Makes the guide of an engine over its vocabulary."""


def forms_of(params: SamplingParams) -> dict[Form, Any]:
    """The fields of a request that say what its output must be, with their values."""
    asked: dict[Form, Any] = {
        "json_schema": params.json_schema,
        "json_object": params.json_object or None,
        "regex": params.regex,
        "choice": params.choice or None,
        "grammar": params.grammar,
    }
    return {form: value for form, value in asked.items() if value is not None}


def num_words(vocab_size: int) -> int:
    """Words of a mask."""
    return -(-vocab_size // 32)


def with_tokens(bits: np.ndarray, token_ids: tuple[int, ...]) -> np.ndarray:
    """A copy of a mask in which these tokens are allowed too."""
    ids = np.asarray(token_ids, np.int64)
    more = bits.copy()
    np.bitwise_or.at(more, ids // 32, np.left_shift(np.uint32(1), (ids % 32).astype(np.uint32)))
    return more
