"""Which tokens a finite set of texts allows: the slow and simple reference for grammars."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from enginebay.compose.composition import make_plan
from enginebay.config import EngineConfig
from enginebay.contracts.constraint import Vocabulary, num_words

PADDING = 37
"""Number of logits beyond the tokenizer's tokens in the vocabulary of the checks."""


@functools.cache
def example_vocabulary() -> Vocabulary:
    """Return the built-in model's tokenizer, with more logits than tokens."""
    plan = make_plan(EngineConfig(model="demo"))
    size = plan.model.info.vocab_size + PADDING
    tokens = plan.checkpoint.token_info
    return Vocabulary(plan.checkpoint.load_tokenizer(), size, tokens.eos_token_ids)


class TokenTexts:
    """The text of each token of a vocabulary, and the tokens that may follow the start
    of a text.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.size = vocabulary.size
        tokenizer, ends = vocabulary.tokenizer, vocabulary.eos_token_ids
        [first, *_] = tokenizer.encode("a", add_special_tokens=False)
        before = tokenizer.decode([first])
        self._texts: dict[int, str] = {}
        for token_id in range(vocabulary.size - PADDING):
            text = tokenizer.decode([first, token_id]).removeprefix(before)
            if text and token_id not in ends and "\ufffd" not in text:
                self._texts[token_id] = text

    def text(self, token_id: int) -> str:
        """Return the text of a token that `allowed` returned."""
        return self._texts[token_id]

    def allowed(self, texts: Sequence[str], begun: str) -> set[int]:
        """Return every token after which the text so far is still the start of one of `texts`."""
        rests = [text[len(begun) :] for text in texts if text.startswith(begun)]
        return {
            token_id
            for token_id, own in self._texts.items()
            if any(rest.startswith(own) for rest in rests)
        }


def token_ids_of(bits: np.ndarray) -> set[int]:
    """Return the tokens that a mask allows."""
    return set(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist())


def mask_of(token_ids: set[int], size: int) -> np.ndarray:
    """Return the mask, uint32 [num_words(size)], that allows these tokens."""
    flags = np.zeros(num_words(size) * 32, np.uint8)
    flags[sorted(token_ids)] = 1
    return np.packbits(flags, bitorder="little").view(np.uint32)
