"""A library of grammars that allows every token and takes its time for one mask, for tests of the
limit of time.
"""

from __future__ import annotations

import json
import time

import numpy as np

from enginebay.contracts.constraint import GrammarLibrary, Vocabulary, num_words
from enginebay.grammar import Constraint, Grammar, Structure

NEVER_S = 600.0


class SlowLibrary(GrammarLibrary):
    """A structure is a list [slow, pause_s, ends]: the mask behind `slow` tokens takes `pause_s`
    seconds, and behind `ends` tokens the text is done.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._size = vocabulary.size

    def compile(self, structure: Structure) -> Grammar:
        return SlowGrammar(self._size, *json.loads(structure.text))


class SlowGrammar(Grammar):
    def __init__(self, size: int, slow: int, pause_s: float, ends: int) -> None:
        self.size, self.slow, self.pause_s, self.ends = size, slow, pause_s, ends

    def start(self) -> Constraint:
        return SlowConstraint(self)


class SlowConstraint(Constraint):
    def __init__(self, grammar: SlowGrammar) -> None:
        self._grammar = grammar
        self._num_tokens = 0
        self._bits: np.ndarray | None = None

    def bits(self) -> np.ndarray:
        if self._bits is None:
            if self._num_tokens == self._grammar.slow:
                time.sleep(self._grammar.pause_s)
            word = 0 if self.may_end else 2**32 - 1
            self._bits = np.full(num_words(self._grammar.size), word, np.uint32)
        return self._bits

    def accept(self, token_id: int) -> None:
        self._num_tokens += 1
        self._bits = None

    @property
    def may_end(self) -> bool:
        return self._num_tokens >= self._grammar.ends
