"""LoraModel: a model whose linear layers add the products of adapters."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.cache import CacheArrays
from enginebay.model import Embeddings, Model, ModelCache, TensorSource, Weights
from enginebay.ops.bound import Ops
from enginebay.ops.spec import AttnBatch
from enginebay.weights import WeightSpec
from enginebay_executor.rules import NamedWeight
from enginebay_lora.layers import AdaptedLayer
from enginebay_lora.ops import LORA

LINEAR = "linear"
"""The name of the op whose results adapters are added to."""


@dataclasses.dataclass(frozen=True)
class AdaptedWeight:
    """A weight that a model passes to the op linear, with its adapters: the pairs (a, b) of its
    parts.
    """

    weight: Any
    layer: AdaptedLayer
    pairs: tuple[tuple[Any, Any], ...]


class LoraModel(Model):
    """A model with slots for adapters. Its weights are those of the inner model and the adapter
    weights.
    """

    def __init__(self, inner: Model, layers: Mapping[str, AdaptedLayer]) -> None:
        self.info, self.inner, self.layers = inner.info, inner, layers
        self._parts = [part for layer in layers.values() for part in layer.parts]

    def weight_specs(self) -> dict[str, WeightSpec]:
        specs = self.inner.weight_specs()
        for part in self._parts:
            specs |= dict(zip((part.a, part.b), part.specs, strict=True))
        return specs

    def tensor_sources(self) -> dict[str, TensorSource]:
        sources = self.inner.tensor_sources()
        for part in self._parts:
            sources |= dict.fromkeys((part.a, part.b), _NO_TENSORS)
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
            ops = ops.replaced(LINEAR, functools.partial(_linear, ops, places))
            weights = self._adapted(weights)
        return self.inner.hidden(weights, ops, token_ids, cache, batches, embeds)

    def logits(self, weights: Weights, ops: Ops, hidden: jax.Array) -> jax.Array:
        return self.inner.logits(weights, ops, hidden)

    def _adapted(self, weights: Weights) -> Any:
        """The weights of the inner model; those with adapters as AdaptedWeights."""
        adapted: dict[str, Any] = dict(weights)
        for path, layer in self.layers.items():
            pairs = []
            for part in layer.parts:
                axes = [spec.axes for spec in part.specs]
                pair: list[Any] = [weights[part.a], weights[part.b]]
                if isinstance(weights[path], NamedWeight):
                    pair = [NamedWeight(*one) for one in zip(pair, axes, strict=True)]
                pairs.append((pair[0], pair[1]))
            adapted[path] = AdaptedWeight(weights[path], layer, tuple(pairs))
        return adapted


def _build_zeros(readers: Sequence[np.ndarray], index: tuple[slice, ...]) -> np.ndarray:
    return np.zeros([piece.stop - piece.start for piece in index], np.float32)


_NO_TENSORS = TensorSource((), (), _build_zeros)
"""Slots are empty at first: they are made of no tensor of the checkpoint."""


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
    y = linear(x, weight.weight, bias, out_dtype=out_dtype)
    axis, parts = weight.layer.axis + 1, weight.layer.parts
    ends = np.cumsum([part.rows.shape[weight.layer.axis] for part in parts])
    pieces = jnp.split(y, ends[:-1], axis=axis) if len(parts) > 1 else [y]
    added = [
        ops[LORA](piece, x, *pair, places) for piece, pair in zip(pieces, weight.pairs, strict=True)
    ]
    return added[0] if len(added) == 1 else jnp.concatenate(added, axis=axis)
