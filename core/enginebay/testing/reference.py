"""The slow, obvious reference of a whole model: every sequence in one prefill, no engine, no batching."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.build.compose import Plan, make_sampler
from enginebay.build.kernels import OpsBinder
from enginebay.ops.spec import Bucket, derive_batch
from enginebay.runner.step import Layouts

SMALLEST = 32


class ReferenceModel:
    """Logits of whole sequences, by the plan's own model and ops but none of its engine or cache.

    `sampler` is the plan's own, which the logits do not depend on.
    """

    def __init__(self, plan: Plan, weights: dict[str, jax.Array] | None = None) -> None:
        self.plan = plan
        if weights is None:
            assert plan.config.dtype != "auto", "a plan's configuration is settled"
            weights = plan.checkpoint.load_weights(
                plan.model, dtype=plan.config.dtype, place=plan.placement.weight
            )
        self.weights = weights
        self.sampler = make_sampler(plan.registry, plan.config)
        self._compiled: dict[int, jax.stages.Wrapped] = {}

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """f32 [tokens, vocab] of a sequence from its start."""
        count = len(token_ids)
        size = max(SMALLEST, 1 << (count - 1).bit_length())
        if size not in self._compiled:
            self._compiled[size] = jax.jit(self._forward, static_argnums=3)
        padded = np.zeros(size, np.int32)
        padded[:count] = token_ids
        result = self._compiled[size](self.weights, padded, np.asarray([count], np.int32), size)
        return np.asarray(result)[:count]

    def _forward(
        self, weights: dict[str, jax.Array], token_ids: jax.Array, count: jax.Array, size: int
    ) -> jax.Array:
        info, plan = self.plan.model.info, self.plan
        bucket = Bucket(tokens=size, seqs=1, pages_per_seq=1, max_q_len=size, max_kv_len=size, mode="prefill")
        layouts: Layouts = {
            g.name: plan.kernels.layout_type(1, size, g.num_kv_heads, g.head_dim, plan.config.dtype)
            for g in info.groups
        }
        ops = OpsBinder(plan.kernels, info, plan.placement)(bucket, layouts)
        table = jnp.zeros((1, 1), jnp.int32)
        batches = {name: derive_batch(count, count, table, size, bucket) for name in layouts}
        cache = {g.name: tuple(layouts[g.name].init() for _ in range(g.num_layers)) for g in info.groups}
        hidden, _ = plan.model.hidden(weights, ops, token_ids, cache, batches)
        return plan.model.logits(weights, ops, hidden)

    def first_wrong_token(self, prompt: Sequence[int], output: Sequence[int], tolerance: float) -> int | None:
        """Index of the first greedy output token whose logit is more than `tolerance` below the best, or None."""
        scores = self.logits([*prompt, *output])[len(prompt) - 1 : -1]
        chosen = scores[np.arange(len(output)), np.asarray(output)]
        wrong = np.flatnonzero(scores.max(axis=1) - chosen > tolerance)
        return int(wrong[0]) if len(wrong) else None
