"""Gives a model with a quantised cache the centres of its keys, and measures them when its weights
are loaded (`enginebay.ops.key_centers`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.compose.kernels import ChosenKernels
from enginebay.compose.ops import ATTENTION
from enginebay.compose.partition import split_model
from enginebay.compose.single_row import SingleRow
from enginebay.contracts.cache import CacheArrays
from enginebay.contracts.model import (
    Embeddings,
    Model,
    ModelCache,
    TensorSource,
    Weights,
    made_of_no_tensor,
)
from enginebay.contracts.placement import Placement
from enginebay.ops.attention import NO_INPUTS, NamedInputs
from enginebay.ops.bound import Ops
from enginebay.ops.key_centers import (
    CENTER_AXES,
    center_path,
    has_center,
    with_center,
    without_center,
)
from enginebay.ops.rotary import RopeSpec
from enginebay.ops.spec import AttnBatch, AttnSpec
from enginebay.weights import Weight, WeightSpec

NUM_TOKENS = 64
"""Centres are means over this many tokens, drawn at random."""

MAX_DISTANCE = 32
"""Max positions from one of the tokens to the next. Over 64 neighbouring positions, the pairs of
channels that turn slowly hardly turn, and their mean would be wrong a thousand positions on.
"""

_MEAN = "key_mean"


def with_key_centers(model: Model) -> Model:
    """Return the model with weights for the centres of the groups that have some."""
    groups = tuple(g.name for g in model.info.groups if has_center(model.info.attention[g.name]))
    return CenteredModel(model, groups) if groups else model


class CenteredModel(Model):
    """A model that passes the centre of each layer's keys to attention, with the layer's cache. Its
    weights are those of the inner model and the centres.
    """

    def __init__(self, inner: Model, groups: tuple[str, ...]) -> None:
        self.info, self.inner, self._groups = inner.info, inner, groups

    def weight_specs(self) -> dict[str, WeightSpec]:
        specs = dict(self.inner.weight_specs())
        for group in self.info.groups:
            if group.name in self._groups:
                shape = (group.num_layers, group.num_kv_heads, group.head_dim)
                spec = WeightSpec(shape, (None, *CENTER_AXES), dtype="float32")
                specs[center_path(group.name)] = spec
        return specs

    def tensor_sources(self) -> dict[str, TensorSource]:
        specs, paths = self.weight_specs(), map(center_path, self._groups)
        made = {path: made_of_no_tensor(specs[path].shape) for path in paths}
        return {**self.inner.tensor_sources(), **made}

    def hidden(
        self,
        weights: Weights,
        ops: Ops,
        token_ids: jax.Array,
        cache: ModelCache,
        batches: Mapping[str, AttnBatch],
        embeds: Embeddings | None = None,
    ) -> tuple[jax.Array, dict[str, tuple[CacheArrays, ...]]]:
        given = dict(cache)
        for group in self._groups:
            given[group] = tuple(
                with_center(layer, weights, group, i) for i, layer in enumerate(cache[group])
            )
        hidden, after = self.inner.hidden(weights, ops, token_ids, given, batches, embeds)
        own = {g: tuple(without_center(layer)[0] for layer in after[g]) for g in self._groups}
        return hidden, {**after, **own}

    def logits(self, weights: Weights, ops: Ops, hidden: jax.Array) -> jax.Array:
        return self.inner.logits(weights, ops, hidden)


def with_measured_centers(
    model: Model, kernels: ChosenKernels, placement: Placement, weights: dict[str, Weight]
) -> dict[str, Weight]:
    """Return the weights of a model with the centres of its keys."""
    centers = measured_centers(model, kernels, placement, weights)
    return {**weights, **centers} if centers else weights


def measured_centers(
    model: Model, kernels: ChosenKernels, placement: Placement, weights: Weights
) -> dict[str, jax.Array]:
    """Return the centres of a model's keys by path: means of the keys of random tokens. A mean that
    is not finite is 0. Centres among `weights` count as 0, so that they do not change the means.
    """
    specs = model.weight_specs()
    paths = {g.name: p for g in model.info.groups if (p := center_path(g.name)) in specs}
    if not paths:
        return {}
    placed = {path: placement.weight(path, specs[path]) for path in paths.values()}
    none = {
        path: jax.device_put(np.zeros(specs[path].shape, np.float32), where)
        for path, where in placed.items()
    }
    measured = {}
    for group, layers in _run(model, kernels, placement, {**weights, **none}).items():
        if group in paths:
            means = np.stack([np.asarray(layer[_MEAN]) for layer in layers])
            path = paths[group]
            means = np.where(np.isfinite(means), means, 0)
            measured[path] = jax.device_put(means, placed[path])
    return measured


def _run(
    model: Model, kernels: ChosenKernels, placement: Placement, weights: Weights
) -> Mapping[str, tuple[CacheArrays, ...]]:
    """Compute the random tokens as one row; return the cache, with the mean keys of each layer."""
    row, whole = (
        SingleRow.of(model.info, kernels, placement, NUM_TOKENS),
        split_model(model, placement),
    )
    # One program in place of one for each operation.
    cache, batches = jax.jit(row.inputs)(np.asarray([NUM_TOKENS], np.int32))
    around = kernels.ops[ATTENTION].calls
    assert around is not None, "attention names the ops around it"
    distance = max(1, min(MAX_DISTANCE, model.info.max_model_len // NUM_TOKENS))
    measuring = _measuring(row.ops, around.rotate, distance)
    ops = row.ops.replaced(ATTENTION, measuring, shares_layers=row.ops.shares_layers)
    drawn = np.random.default_rng(0).integers(0, model.info.num_token_ids, NUM_TOKENS, np.int32)
    return whole.hidden(weights, ops.in_step(batches), jnp.asarray(drawn), cache, batches)[1]


def _measuring(ops: Ops, rotate: str, distance: int) -> Any:
    """Return attention that also returns the mean of a layer's keys, in its cache. Tokens turn as
    if there were `distance` positions from one to the next.
    """
    attention, rope_op = ops.named(ATTENTION), ops.named(rotate)

    def measuring(
        q: jax.Array,
        k: jax.Array | None,
        v: jax.Array | None,
        cache: CacheArrays,
        batch: AttnBatch,
        *,
        spec: AttnSpec,
        rope: RopeSpec | None = None,
        inputs: NamedInputs = NO_INPUTS,
    ) -> tuple[jax.Array, CacheArrays, jax.Array | None]:
        if rope is not None:
            positions = batch.positions * distance
            q = rope_op(q, positions, spec=rope)
            k = None if k is None else rope_op(k, positions, spec=rope)
        out, cache, lse = attention(q, k, v, cache, batch, spec=spec, inputs=inputs)
        if k is not None:
            cache = {**cache, _MEAN: k.astype(jnp.float32).mean(axis=0)}
        return out, cache, lse

    return measuring
