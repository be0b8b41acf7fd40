"""The contract of guided decoding: libraries that compile grammars, on the host."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import Any, ClassVar, get_args

import numpy as np
from pydantic import BaseModel

from enginebay.contracts.text import Tokenizer
from enginebay.grammar import Form, Grammar, Structure
from enginebay.types import SamplingParams

GUIDED, BITS = "guided", "bits"
"""The name of the logits processor that allows only the tokens of a mask, and the name of its only
field, the mask: uint32 [num_words(vocab_size)].
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Vocabulary:
    """The vocabulary of one model: its tokenizer, its number of logits (`size`), and the ids that
    end a sequence.

    Ids that the tokenizer does not know are never allowed: models may pad their vocabulary.
    """

    tokenizer: Tokenizer
    size: int
    eos_token_ids: tuple[int, ...]


class GrammarLibrary(ABC):
    """Compiles grammars. The setting `grammars` names a subclass as "module:attribute". The first
    guided request of an engine makes an instance, from a Vocabulary and, with an `options_model`,
    the options.

    The constructor raises UnsupportedError for a tokenizer that the library cannot use. Methods may
    be called from several threads. An instance is also made in a worker process, which compiles
    each structure first (see `enginebay.text.guides`); there `tokenizer.inner` only has
    `backend_tokenizer`, `encode` and `decode`. Importing the library's module must not import JAX.
    """

    options_model: ClassVar[type[BaseModel] | None] = None
    """A frozen pydantic model with extra="forbid" for the section `grammars` of a configuration."""

    @abstractmethod
    def compile(self, structure: Structure) -> Grammar:
        """Compile a structure. RequestError, with the library's reason, for a structure that is
        malformed, that matches nothing, or that the library can enforce only in part.
        """


def forms_of(params: SamplingParams) -> dict[Form, Any]:
    """Return the fields that guide the output of a request, with their values; {} for none."""
    forms = {form: getattr(params, form) for form in get_args(Form)}
    return {form: value for form, value in forms.items() if value not in (None, False)}


def num_words(vocab_size: int) -> int:
    """Return the number of 32-bit words in a mask."""
    return -(-vocab_size // 32)


def with_tokens(bits: np.ndarray, token_ids: tuple[int, ...]) -> np.ndarray:
    """Return a copy of a mask in which these tokens are allowed, too."""
    ids = np.asarray(token_ids, np.int64)
    more = bits.copy()
    np.bitwise_or.at(more, ids // 32, np.left_shift(np.uint32(1), (ids % 32).astype(np.uint32)))
    return more
