"""LoraModel: a model whose linear layers add the products of adapters."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from enginebay.contracts.cache import CacheArrays
from enginebay.contracts.model import (
    Embeddings,
    Model,
    ModelCache,
    TensorSource,
    Weights,
    made_of_no_tensor,
)
from enginebay.ops.bound import Ops
from enginebay.ops.partition_rules import NamedWeight
from enginebay.ops.spec import AttnBatch
from enginebay.weights import WeightSpec
from enginebay_lora.layers import Adapted, AdaptedEmbedding
from enginebay_lora.ops import LORA

LINEAR, EMBEDDING = "linear", "embedding"
"""The names of the ops whose results adapters are added to."""


@dataclasses.dataclass(frozen=True)
class AdaptedWeight:
    """A weight that a model passes to linear or embedding, with its adapter weights."""

    weight: Any
    layer: Adapted
    a: Any
    b: Any


class LoraModel(Model):
    """A model with slots for adapters. Its weights are those of the inner model and the adapter
    weights.
    """

    def __init__(self, inner: Model, layers: Mapping[str, Adapted]) -> None:
        self.info, self.inner, self.layers = inner.info, inner, layers

    def weight_specs(self) -> dict[str, WeightSpec]:
        specs = dict(self.inner.weight_specs())
        for layer in self.layers.values():
            specs |= dict(zip((layer.a, layer.b), layer.specs, strict=True))
        return specs

    def tensor_sources(self) -> dict[str, TensorSource]:
        sources = dict(self.inner.tensor_sources())
        for layer in self.layers.values():  # slots are empty at first
            made = [made_of_no_tensor(spec.shape) for spec in layer.specs]
            sources |= zip((layer.a, layer.b), made, strict=True)
        return sources

    def hidden(
        self,
        weights: Weights,
        ops: Ops,
        token_ids: jax.Array,
        cache: ModelCache,
        batches: Mapping[str, AttnBatch],
        embeds: Embeddings | None = None,
    ) -> tuple[jax.Array, dict[str, tuple[CacheArrays, ...]]]:
        places = None if ops.batch is None else ops.batch.adapters
        if places is not None:
            embedding = functools.partial(_embedding, ops, places)
            linear = functools.partial(_linear, ops, places)
            ops = ops.replaced(LINEAR, linear).replaced(EMBEDDING, embedding)
            weights = self._adapted(weights)
        return self.inner.hidden(weights, ops, token_ids, cache, batches, embeds)

    def logits(self, weights: Weights, ops: Ops, hidden: jax.Array) -> jax.Array:
        if ops.adapters is not None:
            ops = ops.replaced(LINEAR, functools.partial(_linear, ops, ops.adapters))
            weights = self._adapted(weights)
        return self.inner.logits(weights, ops, hidden)

    def _adapted(self, weights: Weights) -> Any:
        """The weights of the inner model; those with adapters as AdaptedWeights."""
        adapted: dict[str, Any] = dict(weights)
        for path, layer in self.layers.items():
            pair: list[Any] = [weights[layer.a], weights[layer.b]]
            if isinstance(weights[path], NamedWeight):
                axes = [spec.axes for spec in layer.specs]
                pair = [NamedWeight(*one) for one in zip(pair, axes, strict=True)]
            adapted[path] = AdaptedWeight(weights[path], layer, *pair)
        return adapted


def _linear(
    ops: Ops,
    places: jax.Array,
    x: jax.Array,
    weight: Any,
    bias: jax.Array | None = None,
    *,
    out_dtype: Any = None,
) -> jax.Array:
    """The op linear, and the op lora for a weight with adapters. places int32 [T]."""
    linear = ops.named(LINEAR)
    if not isinstance(weight, AdaptedWeight):
        return linear(x, weight, bias, out_dtype=out_dtype)
    y, layer = linear(x, weight.weight, bias, out_dtype=out_dtype), weight.layer
    if isinstance(layer, AdaptedEmbedding):
        return y  # the embedding is the head too, and its adapter does not change the head
    return ops[LORA](y, x, weight.a, weight.b, places, axis=layer.axis, ends=layer.ends)


def _embedding(ops: Ops, places: jax.Array, table: Any, ids: jax.Array) -> jax.Array:
    """The op embedding, and the op lora for a table with adapters: each token's row of a is x."""
    embedding = ops.named(EMBEDDING)
    if not isinstance(table, AdaptedWeight):
        return embedding(table, ids)
    y, layer = embedding(table.weight, ids), table.layer
    if not isinstance(layer, AdaptedEmbedding):
        return y
    a: Any = table.a.weight if isinstance(table.a, NamedWeight) else table.a
    num_slots, _, rank = a.shape
    x = a.at[jnp.maximum(places - 1, 0), ids].get(mode="fill", fill_value=0)
    identity = jnp.broadcast_to(jnp.eye(rank, dtype=a.dtype), (num_slots, 1, rank, rank))
    return ops[LORA](y, x, identity, table.b, places)
