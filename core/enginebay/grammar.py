"""Grammars of guided requests: the structure that a request asks for, its compiled form, and the
state of one completion within it.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import Literal

import numpy as np

from enginebay.errors import RequestError

Form = Literal["json_schema", "json_object", "regex", "choice", "grammar"]


@dataclasses.dataclass(frozen=True, slots=True)
class Structure:
    """The form that an output must have. `text` is a JSON schema, a regular expression, a JSON list
    of texts (for "choice"), or a grammar, depending on `form`.
    """

    form: Form
    text: str


class Constraint(ABC):
    """The state of one completion in its grammar. One thread at a time uses it.

    Any method may raise RequestError when the grammar turns out to be too complex; the request then
    ends with this error.
    """

    @abstractmethod
    def bits(self) -> np.ndarray:
        """Return the mask of allowed next tokens, uint32 [num_words(vocab_size)]: bit i % 32 of
        word i // 32 is set when token i is allowed. Bits of end-of-sequence tokens are never set.

        The array must not be changed afterwards, because it may be read much later. RequestError
        when the text can neither continue nor end.
        """

    @abstractmethod
    def accept(self, token_id: int) -> None:
        """Advance by one token. For a token that `bits` does not allow, this call or the next call
        of `bits` raises RequestError.
        """

    def wait(self, timeout_s: float) -> bool:
        """Wait until the next mask is ready, at most `timeout_s` seconds; return whether it is.

        False is possible only where another process computes the mask after the last token.
        """
        return True

    @property
    @abstractmethod
    def may_end(self) -> bool:
        """Whether the text so far is complete, so that the output may end here."""

    @property
    def is_done(self) -> bool:
        """Whether the text is complete and no token may follow."""
        return not self.bits().any() and self.may_end


class Grammar(ABC):
    """A compiled structure. Any thread may use it; each completion has its own Constraint."""

    @abstractmethod
    def start(self) -> Constraint:
        """Return a Constraint for an empty output, with its first mask already computed."""

    @property
    def refusal(self) -> RequestError | None:
        """The error for further requests with this grammar, after a request has exceeded a limit;
        None while requests may use it.
        """
        return None
