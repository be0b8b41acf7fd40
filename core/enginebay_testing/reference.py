"""A slow and simple reference for a whole model: each sequence is one prefill, without engine and
batching.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.compose.binding import OpsBinder
from enginebay.compose.composition import make_sampler
from enginebay.compose.partition import split_model
from enginebay.compose.plan import Plan
from enginebay.contracts.cache_shape import CacheShape
from enginebay.contracts.executor import Layouts
from enginebay.contracts.model import Weights
from enginebay.ops.batches import derive_batch
from enginebay.ops.bound import Ops
from enginebay.ops.sampling import without_padding
from enginebay.ops.spec import Bucket
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
        info, plan = self.plan.model.info, self.plan
        page_size = plan.kernels.smallest_page or size
        num_pages = -(-size // page_size)
        bucket = Bucket(size, 1, num_pages, size, size, "prefill")
        layouts: Layouts = {
            group: spec.make_layout(plan.kernels.layout_type, num_pages, page_size)
            for group, spec in info.attention.items()
        } | {s.name: s.make_layout(CacheShape(1, 1, size)) for s in info.states}
        ops = OpsBinder(plan.kernels, info, plan.placement)(bucket, layouts)
        table = jnp.arange(num_pages, dtype=jnp.int32)[None]
        batches = {
            name: derive_batch(count, count, table, layout.page_size, bucket)
            for name, layout in layouts.items()
        }
        cache = {
            g.name: tuple(layouts[g.name].init() for _ in range(g.num_layers))
            for g in info.cache_groups
        }
        in_step = ops.in_step(batches)
        model = split_model(plan.model, plan.placement)
        return model.hidden(weights, in_step, token_ids, cache, batches)[0], ops

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
