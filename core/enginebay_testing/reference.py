"""A slow and simple reference for a whole model: each sequence is one prefill, without engine and
batching.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np

from enginebay.compose.composition import make_sampler
from enginebay.compose.partition import split_model
from enginebay.compose.plan import Plan
from enginebay.compose.single_row import SingleRow
from enginebay.contracts.model import Weights
from enginebay.ops.bound import Ops
from enginebay.ops.sampling import without_padding
from enginebay.types import SamplingParams
from enginebay_testing.sampling_oracle import OracleParams, penalised

SMALLEST = 256
"""Sequences are padded to this length, or to the next power of two above it, so that few programs
serve all lengths.
"""


class ReferenceModel:
    """Logits of whole sequences, computed with the plan's model and ops, but without its engine and
    cache.

    `sampler` is the plan's own sampler; `sample` is the same sampler, compiled.
    """

    def __init__(self, plan: Plan, weights: Weights | None = None) -> None:
        self.plan = plan
        if weights is None:
            assert plan.config.dtype != "auto", "a plan's configuration is settled"
            weights = plan.load_weights()
        self.weights = weights
        self.sampler = make_sampler(plan.registry, plan.config, plan.kernels.plain)
        self.sample = jax.jit(self.sampler)
        self._compiled = jax.jit(self._forward, static_argnums=3)

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Return f32 logits [tokens, vocab] of a sequence from its start; -inf for the padding of
        the vocabulary.
        """
        return self._run(self._compiled, token_ids)

    def hidden(self, token_ids: Sequence[int]) -> np.ndarray:
        """Return the final hidden states of a sequence from its start, f32 [tokens,
        hidden_size].
        """
        return self._run(jax.jit(self._hidden, static_argnums=3), token_ids)

    def _run(self, compiled: Callable[..., jax.Array], token_ids: Sequence[int]) -> np.ndarray:
        count = len(token_ids)
        size = max(SMALLEST, 1 << (count - 1).bit_length())
        padded = np.zeros(size, np.int32)
        padded[:count] = token_ids
        result = compiled(self.weights, padded, np.asarray([count], np.int32), size)
        return np.asarray(result)[:count]

    def _hidden(
        self, weights: Weights, token_ids: jax.Array, count: jax.Array, size: int
    ) -> jax.Array:
        return self._both(weights, token_ids, count, size)[0]

    def _forward(
        self, weights: Weights, token_ids: jax.Array, count: jax.Array, size: int
    ) -> jax.Array:
        hidden, ops = self._both(weights, token_ids, count, size)
        logits = self.plan.model.logits(weights, ops, hidden)
        return without_padding(logits, self.plan.model.info.padding_from)

    def _both(
        self, weights: Weights, token_ids: jax.Array, count: jax.Array, size: int
    ) -> tuple[jax.Array, Ops]:
        plan = self.plan
        row = SingleRow.of(plan.model.info, plan.kernels, plan.placement, size)
        cache, batches = row.inputs(count)
        model = split_model(plan.model, plan.placement)
        hidden, _ = model.hidden(weights, row.ops.in_step(batches), token_ids, cache, batches)
        return hidden, row.ops

    def first_wrong_token(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        tolerance: float,
        params: SamplingParams | None = None,
    ) -> int | None:
        """Return the index of the first greedy output token that is not the best one after the
        penalties of `params`, or None.

        `tolerance` is how far rounding may move a logit; a repetition penalty enlarges it.
        """
        penalties = OracleParams()
        if params is not None:
            penalties = OracleParams(
                presence_penalty=params.presence_penalty,
                frequency_penalty=params.frequency_penalty,
                repetition_penalty=params.repetition_penalty,
            )
        tolerance *= max(penalties.repetition_penalty, 1 / penalties.repetition_penalty)
        logits = self.logits([*prompt, *output])[len(prompt) - 1 : -1]
        for at, row in enumerate(logits):
            scores = penalised(row, penalties, prompt, output[:at])
            if scores.max() - scores[output[at]] > tolerance:
                return at
        return None
