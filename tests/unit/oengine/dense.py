"""Keys and values of a sequence computed at once, without pages: what the cache must hold however it was filled."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.build.kernels import OpsBinder
from enginebay.ops.spec import Bucket, derive_batch
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
        whole = self._forward(dict(self.model.weights), padded, np.asarray([len(token_ids)], np.int32))
        return np.asarray(whole)[:, :, : len(token_ids)]

    def _run(self, weights: dict[str, jax.Array], token_ids: jax.Array, count: jax.Array) -> jax.Array:
        plan, layout, name = self.model.plan, self.layout, self.group.name
        bucket = Bucket(SIZE, 1, 1, SIZE, SIZE, "prefill")
        ops = OpsBinder(plan.kernels, plan.model.info, plan.placement)(bucket, {name: layout})
        batch = derive_batch(count, count, jnp.zeros((1, 1), jnp.int32), SIZE, bucket)
        cache = {name: tuple(layout.init() for _ in range(self.group.num_layers))}
        _, cache = plan.model.hidden(weights, ops, token_ids, cache, {name: batch})
        pairs = [layout.read_tokens(layer, jnp.arange(SIZE)) for layer in cache[name]]
        return jnp.stack([jnp.stack(pair) for pair in pairs])


def paged_keys_and_values(engine: oEngine, state: ActiveSequenceBatch, slot: int, count: int) -> np.ndarray:
    """The same of the first tokens of a slot, out of its pages."""
    ((name, layout),) = engine.metadata.layouts.items()
    pages = np.asarray(state.page_table)[slot]
    position = np.arange(count)
    places = jnp.asarray(pages[position // layout.page_size] * layout.page_size + position % layout.page_size)
    pairs = [layout.read_tokens(layer, places) for layer in engine.storage.views[name]]
    return np.stack([np.stack([np.asarray(part) for part in pair]) for pair in pairs])
