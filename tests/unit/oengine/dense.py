"""Keys and values of a sequence computed at once, without pages: what the cache must hold however
it was filled.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.compose.binding import OpsBinder
from enginebay.ops.batches import derive_batch
from enginebay.ops.spec import Bucket
from enginebay_oengine import ActiveSequenceBatch, OpenedModel, oEngine

SIZE = 160


class DenseModel:
    """A model with one cache group, on a cache of one page; compiled once."""

    def __init__(self, model: OpenedModel) -> None:
        self.model = model
        plan = model.plan
        (self.group,) = plan.model.info.groups
        self.layout = plan.kernels.layout_type(
            1, SIZE, self.group.num_kv_heads, self.group.head_dim, plan.config.dtype
        )
        self._forward = jax.jit(self._run)

    def keys_and_values(self, token_ids: np.ndarray) -> np.ndarray:
        """f32 [layers, 2, tokens, kv_heads, head_dim] of a sequence, all of it in one prefill."""
        padded = np.zeros(SIZE, np.int32)
        padded[: len(token_ids)] = token_ids
        whole = self._forward(
            dict(self.model.weights), padded, np.asarray([len(token_ids)], np.int32)
        )
        return np.asarray(whole)[:, :, : len(token_ids)]

    def _run(
        self, weights: dict[str, jax.Array], token_ids: jax.Array, count: jax.Array
    ) -> jax.Array:
        plan, layout, name = self.model.plan, self.layout, self.group.name
        bucket = Bucket(SIZE, 1, 1, SIZE, SIZE, "prefill")
        ops = OpsBinder(plan.kernels, plan.model.info, plan.placement)(bucket, {name: layout})
        batch = derive_batch(count, count, jnp.zeros((1, 1), jnp.int32), SIZE, bucket)
        cache = {name: tuple(layout.init() for _ in range(self.group.num_layers))}
        _, cache = plan.model.hidden(weights, ops, token_ids, cache, {name: batch})
        pairs = [layout.read_tokens(layer, jnp.arange(SIZE)) for layer in cache[name]]
        return jnp.stack([jnp.stack(pair) for pair in pairs])


class PagedReader:
    """The same out of the pages of slots; compiled once."""

    def __init__(self, engine: oEngine) -> None:
        ((self.name, self.layout),) = engine.metadata.layouts.items()
        self._gather = jax.jit(self._run)

    def keys_and_values(
        self, engine: oEngine, state: ActiveSequenceBatch, slot: int, count: int
    ) -> np.ndarray:
        """f32 [layers, 2, tokens, kv_heads, head_dim] of the first `count` tokens of a slot."""
        pages = np.asarray(state.page_table)[slot]
        position = np.minimum(np.arange(SIZE), count - 1)
        size = self.layout.page_size
        places = pages[position // size] * size + position % size
        return np.asarray(self._gather(engine.storage.views[self.name], places))[:, :, :count]

    def _run(self, layers: Any, places: jax.Array) -> jax.Array:
        pairs = [self.layout.read_tokens(layer, places) for layer in layers]
        return jnp.stack([jnp.stack(pair) for pair in pairs])
