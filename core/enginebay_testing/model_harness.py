"""Runs a model step by step on tiny caches, for the model checks and the parity tests."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.config import DEFAULT_AXIS_RULES
from enginebay.contracts.cache import CacheLayout
from enginebay.contracts.cache_shape import CacheShape
from enginebay.contracts.executor import Layouts
from enginebay.contracts.model import Model, ModelCache, ModelInfo, Weights
from enginebay.contracts.placement import Placement, make_placement
from enginebay.ops.batches import derive_batch
from enginebay.ops.bound import Ops
from enginebay.ops.spec import Bucket
from enginebay_testing.layouts import installed_layouts

MakeOps = Callable[[ModelInfo, Placement], Callable[[Bucket, Layouts], Ops]]
"""Makes, from a model's facts and its placement, the object that binds the ops of a step, such as
enginebay.compose.binding.OpsBinder.
"""


@dataclasses.dataclass(frozen=True)
class Chunk:
    """New tokens of one row: `page` is the row's own cache page, `start` its number of earlier
    tokens.
    """

    page: int
    start: int
    token_ids: Sequence[int]


def place_over(num_devices: int) -> Placement:
    """Return a placement that splits heads, kv_heads, mlp, vocab and expert over the first
    `num_devices` devices.
    """
    rules: dict[str, str | None] = dict.fromkeys(DEFAULT_AXIS_RULES)
    rules |= dict.fromkeys(("heads", "kv_heads", "mlp", "vocab", "expert"), "tensor")
    return make_placement(jax.devices(), {"tensor": num_devices}, rules)


def random_tensor(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Return f32 [*shape], which depends only on name and seed; products keep their scale, norms
    are near 1.
    """
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    values = rng.standard_normal(shape, dtype=np.float32)
    if len(shape) > 1:
        return values / np.float32(np.sqrt(shape[-1]))
    return np.asarray(values * np.float32(0.1) + np.float32("norm" in name))


def random_weights(
    model: Model, placement: Placement, *, dtype: str, seed: int = 0
) -> dict[str, jax.Array]:
    """Return weights made from random checkpoint tensors; every sharding of a model gets equal
    values.
    """
    weights = {}
    for path, source in model.tensor_sources().items():
        spec = model.weight_specs()[path]
        tensors = [
            random_tensor(name, shape, seed)
            for name, shape in zip(source.names, source.shapes, strict=True)
        ]
        value = source.build(tensors, (slice(None),) * len(spec.shape))
        weights[path] = jax.device_put(
            np.ascontiguousarray(value).astype(jnp.dtype(spec.dtype or dtype)),
            placement.weight(path, spec),
        )
    return weights


class ModelHarness:
    """A model with weights, a cache of one page per row, and compiled steps. Not optimised for
    speed.
    """

    def __init__(
        self,
        model: Model,
        weights: Weights,
        make_ops: MakeOps,
        placement: Placement,
        *,
        num_rows: int,
        capacity: int,
    ) -> None:
        self.model = model
        self.weights = weights
        self.placement = placement
        self._make_ops = make_ops(model.info, placement)
        kind = installed_layouts()["hnd"]
        shape = CacheShape(1, num_rows, capacity)
        self.layouts: dict[str, CacheLayout] = {
            group: spec.make_layout(kind, num_rows, capacity)
            for group, spec in model.info.attention.items()
        } | {state.name: state.make_layout(shape) for state in model.info.states}
        self.cache = self.empty_cache()
        self._step = jax.jit(self._traced, static_argnums=0)

    def empty_cache(self) -> ModelCache:
        """Return zeroed arrays for all groups, placed as the placement says."""
        return {
            group.name: tuple(
                self._empty_layer(self.layouts[group.name]) for _ in range(group.num_layers)
            )
            for group in self.model.info.cache_groups
        }

    def _empty_layer(self, layout: CacheLayout) -> dict[str, jax.Array]:
        where = self.placement.cache(layout)
        return {name: jax.device_put(array, where[name]) for name, array in layout.init().items()}

    def run(self, chunks: Sequence[Chunk], bucket: Bucket, *, pad_id: int = 0) -> list[np.ndarray]:
        """Process chunks (sorted as AttnBatch requires) in one step; return f32 logits [tokens,
        vocab] for each chunk.

        The cache keeps what was written. `pad_id` is the token id of padding.
        """
        token_ids = np.full(bucket.tokens, pad_id, np.int32)
        q_lens, kv_lens = np.zeros(bucket.seqs, np.int32), np.zeros(bucket.seqs, np.int32)
        table = np.zeros((bucket.seqs, 1), np.int32)
        ends = np.cumsum([len(chunk.token_ids) for chunk in chunks])
        for i, (chunk, end) in enumerate(zip(chunks, ends, strict=True)):
            token_ids[end - len(chunk.token_ids) : end] = chunk.token_ids
            q_lens[i], kv_lens[i] = len(chunk.token_ids), chunk.start + len(chunk.token_ids)
            table[i] = chunk.page
        _, logits, self.cache = self._step(
            bucket, self.weights, self.cache, token_ids, (q_lens, kv_lens, table)
        )
        whole = np.asarray(logits)
        return [
            whole[end - len(chunk.token_ids) : end] for chunk, end in zip(chunks, ends, strict=True)
        ]

    def _traced(
        self,
        bucket: Bucket,
        weights: Weights,
        cache: ModelCache,
        token_ids: Any,
        rows: Sequence[Any],
    ) -> Any:
        q_lens, kv_lens, table = rows
        ops = self._make_ops(bucket, self.layouts)
        batch_of = functools.partial(derive_batch, q_lens, kv_lens, table)
        batches = {
            name: batch_of(layout.page_size, bucket) for name, layout in self.layouts.items()
        }
        in_step = ops.in_step(batches)
        hidden, cache = self.model.hidden(weights, in_step, token_ids, cache, batches)
        return hidden, self.model.logits(weights, ops, hidden), cache

    def shapes(self, bucket: Bucket) -> Any:
        """Return shapes and dtypes of a step's (hidden states, logits, cache) without compiling."""
        shapes = ((bucket.tokens,), (bucket.seqs,), (bucket.seqs,), (bucket.seqs, 1))
        token_ids, *rows = (jax.ShapeDtypeStruct(n, jnp.int32) for n in shapes)
        return jax.eval_shape(
            functools.partial(self._traced, bucket), self.weights, self.cache, token_ids, rows
        )


def teacher_forced(
    harness: ModelHarness, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]]
) -> list[np.ndarray]:
    """Return logits [prompt + continuation, vocab] of each row, from one prefill."""
    chunks = [
        Chunk(page, 0, [*p, *c])
        for page, (p, c) in enumerate(zip(prompts, continuations, strict=True))
    ]
    longest = max(len(chunk.token_ids) for chunk in chunks)
    tokens = sum(len(chunk.token_ids) for chunk in chunks)
    return harness.run(chunks, Bucket(tokens, len(chunks), 1, longest, longest, "prefill"))


def greedy_mismatch(logits: np.ndarray, token_ids: Sequence[int], tolerance: float) -> int | None:
    """Return the first position whose best token is not the given token, or None.

    logits f32 [tokens, vocab]. The comparison stops, without a mismatch, where the two best scores
    are closer than `tolerance`: from there on, two correct implementations may differ.
    """
    for position, (row, token) in enumerate(zip(logits, token_ids, strict=True)):
        second, first = np.partition(row, -2)[-2:]
        if first - second < tolerance:
            return None
        if int(row.argmax()) != token:
            return position
    return None
