"""A slow and simple reference for a whole model: each sequence is one prefill, without engine and
batching.
"""

from __future__ import annotations

import dataclasses
import functools
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
from enginebay.weights import FLOAT, QuantizedArray
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

    def rounding(self, token_ids: Sequence[int]) -> np.ndarray:
        """Return how far a logit of a sequence may move because inputs of weights are rounded to
        int8, f32 [tokens]: 0 where the weights do not ask for it.

        A last bit of an input decides between two codes, which are a rounding step apart, and a
        step is more than a last bit of all that is computed from it: the codes after it may differ
        too. So two right computations have in common only that each code is at most half a step
        from its input. A logit of either is then as far from that of inputs that are not rounded
        as the half steps move it, and the two are at most twice as far from each other. The
        distance is measured: it is the largest one between a logit of these weights and the same
        logit without rounding.
        """
        if not self.plan.weight_format.needs["activation_quantizations"]:
            return np.zeros(len(token_ids), np.float32)
        exact = self._run(self._compiled, token_ids, self._without_rounding)
        distance = np.abs(_finite(self.logits(token_ids)) - _finite(exact)).max(axis=1)
        return np.asarray(2 * distance, np.float32)

    @functools.cached_property
    def _without_rounding(self) -> Weights:
        """The weights, for inputs that are not rounded."""
        return {
            path: dataclasses.replace(weight, activations=FLOAT)
            if isinstance(weight, QuantizedArray)
            else weight
            for path, weight in self.weights.items()
        }

    def _run(
        self,
        compiled: Callable[..., jax.Array],
        token_ids: Sequence[int],
        weights: Weights | None = None,
    ) -> np.ndarray:
        count = len(token_ids)
        size = max(SMALLEST, 1 << (count - 1).bit_length())
        padded = np.zeros(size, np.int32)
        padded[:count] = token_ids
        result = compiled(weights or self.weights, padded, np.asarray([count], np.int32), size)
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

        `tolerance` is how far rounding may move a logit; inputs that are rounded to int8 (see
        `rounding`) and a repetition penalty enlarge it.
        """
        penalties = OracleParams()
        if params is not None:
            penalties = OracleParams(
                presence_penalty=params.presence_penalty,
                frequency_penalty=params.frequency_penalty,
                repetition_penalty=params.repetition_penalty,
            )
        factor = max(penalties.repetition_penalty, 1 / penalties.repetition_penalty)
        logits = self.logits([*prompt, *output])[len(prompt) - 1 : -1]
        tolerances = factor * (tolerance + self.rounding([*prompt, *output])[len(prompt) - 1 : -1])
        for at, row in enumerate(logits):
            scores = penalised(row, penalties, prompt, output[:at])
            if scores.max() - scores[output[at]] > tolerances[at]:
                return at
        return None


def _finite(logits: np.ndarray) -> np.ndarray:
    """Return logits with 0 in the place of those of the vocabulary's padding."""
    return np.where(np.isfinite(logits), logits, np.float32(0))
