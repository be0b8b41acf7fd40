"""LaunchedStep: a step on its way, and what of it comes to the host."""

from __future__ import annotations

import jax
import numpy as np

from enginebay.engine import Pending, TokenLogprobs
from enginebay.errors import InternalError
from enginebay.runner.full_vocab import FullVocab, FullVocabInputs
from enginebay.runner.step import Sampled


class LaunchedStep(Pending):
    """What a launched step sampled; the copy to the host is begun at once, of log-probabilities
    only when they are told.

    Not on a CPU: the host reads its arrays where they lie, and to begin a copy costs a tenth of a
    millisecond.
    """

    def __init__(
        self,
        sampled: Sampled,
        order: np.ndarray,
        full_vocab: FullVocabInputs | None = None,
        *,
        returns_logprobs: bool,
    ) -> None:
        self._sampled = sampled
        self._order = order
        self._asked = full_vocab
        if all(device.platform == "cpu" for device in sampled.tokens.devices()):
            return
        told = (
            sampled.logprobs if returns_logprobs else None,
            self._wide().prompt if full_vocab is not None and full_vocab.spans else None,
            self._wide().rows if full_vocab is not None and full_vocab.returns_all else None,
        )
        for array in jax.tree.leaves((sampled.tokens, told)):
            array.copy_to_host_async()

    def read(self) -> np.ndarray:
        return np.asarray(self._sampled.tokens)[self._order]

    def read_logprobs(self) -> TokenLogprobs:
        logprobs = self._sampled.logprobs
        return TokenLogprobs(
            np.asarray(logprobs.token_ids)[self._order], np.asarray(logprobs.values)[self._order]
        )

    def read_all_logprobs(self, row: int) -> np.ndarray:
        return np.asarray(self._wide().rows)[self._order[row]]

    def read_prompt_logprobs(self, row: int) -> TokenLogprobs:
        told = self._wide().prompt
        if told is None or self._asked is None:
            raise InternalError(
                "a prompt's log-probabilities are read of a step that does not tell them"
            )
        start, count = self._asked.spans[row]
        span = slice(start, start + count)
        return TokenLogprobs(np.asarray(told.token_ids)[span], np.asarray(told.values)[span])

    def read_logits(self) -> np.ndarray:
        if self._sampled.logits is None:
            raise InternalError("logits are read of a program that does not tell them")
        logits = np.asarray(self._sampled.logits)
        return logits if logits.ndim == 2 else logits[self._order[0]]

    def _wide(self) -> FullVocab:
        if self._sampled.full_vocab is None:
            raise InternalError(
                "full-vocabulary log-probabilities are read from a step that does not return them"
            )
        return self._sampled.full_vocab
