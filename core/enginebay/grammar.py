"""Grammars that a request's output keeps to: the structure asked for, and its compiled form, which
follows each completion on the host.
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
    """What an output must be. `text` is a JSON schema, a regular expression, a JSON list of texts,
    or a grammar.
    """

    form: Form
    text: str


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
        """Go on behind a token. RequestError, here or from `bits`, for one that `bits` does not
        allow.
        """

    def wait(self, timeout_s: float) -> bool:
        """Whether the other methods return at once, after a wait of at most `timeout_s` seconds.

        False only where another process computes the mask behind the last accepted token.
        """
        return True

    @property
    @abstractmethod
    def may_end(self) -> bool:
        """Whether the text so far is all that the grammar asks for."""

    @property
    def is_done(self) -> bool:
        """Whether the text can only end."""
        return not self.bits().any() and self.may_end


class Grammar(ABC):
    """A compiled structure. Safe from several threads; each completion has a Constraint of
    its own.
    """

    @abstractmethod
    def start(self) -> Constraint:
        """A constraint at the beginning, whose first mask is computed already."""

    @property
    def refusal(self) -> RequestError | None:
        """Why no further request may use it: a limit that a request exceeded, or None."""
        return None
