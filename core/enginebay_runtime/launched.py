"""LaunchedStep: a launched step, and reading its results to the host."""

from __future__ import annotations

import jax
import numpy as np

from enginebay.contracts.commands import Step
from enginebay.contracts.engine import Pending, TokenLogprobs
from enginebay.errors import InternalError
from enginebay_runtime.full_vocab import FullVocab
from enginebay_runtime.step import Sampled


class LaunchedStep(Pending):
    """The results of a launched step. Their copy to the host begins at once, of log-probabilities
    only when the step asks for them.

    On a CPU no copy is begun: the host reads the arrays in place, and beginning a copy costs 0.1
    ms.
    """

    def __init__(self, sampled: Sampled, step: Step) -> None:
        self._sampled, self.bucket = sampled, step.program.bucket
        self._places, self._spans = step.places, step.spans
        if {device.platform for device in sampled.tokens.devices()} == {"cpu"}:
            return
        returned = (
            sampled.logprobs if step.returns_logprobs else None,
            self._full_vocab().prompt if step.spans else None,
            self._full_vocab().rows if step.returns_all else None,
            sampled.hidden,
        )
        for array in jax.tree.leaves((sampled.tokens, returned)):
            array.copy_to_host_async()

    def read(self) -> np.ndarray:
        return np.asarray(self._sampled.tokens)[self._places]

    def read_logprobs(self) -> TokenLogprobs:
        logprobs = self._sampled.logprobs
        return TokenLogprobs(
            np.asarray(logprobs.token_ids)[self._places], np.asarray(logprobs.values)[self._places]
        )

    def read_all_logprobs(self, row: int) -> np.ndarray:
        return np.asarray(self._full_vocab().rows)[self._places[row]]

    def read_prompt_logprobs(self, row: int) -> TokenLogprobs:
        found = self._full_vocab().prompt
        if found is None or not self._spans:
            raise InternalError(
                "prompt log-probabilities are read from a step that does not return them"
            )
        start, count = self._spans[row]
        span = slice(start, start + count)
        return TokenLogprobs(np.asarray(found.token_ids)[span], np.asarray(found.values)[span])

    def read_hidden(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        if self._sampled.hidden is None:
            raise InternalError("hidden states are read from a step that does not return them")
        total, last = np.asarray(self._sampled.hidden)[self._places[row]]
        return total, last

    def read_logits(self) -> np.ndarray:
        if self._sampled.logits is None:
            raise InternalError("logits are read from a program that does not return them")
        logits = np.asarray(self._sampled.logits)
        return logits if logits.ndim == 2 else logits[self._places[0]]

    def _full_vocab(self) -> FullVocab:
        if self._sampled.full_vocab is None:
            raise InternalError(
                "full-vocabulary log-probabilities are read from a step that does not return them"
            )
        return self._sampled.full_vocab
