"""What a model can ask of attention beside keys and values: slopes by distance (ALiBi), and the
log-sum-exp by which it merges what its queries read in two caches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from enginebay.contracts.cache import CacheArrays, CacheGroup
from enginebay.contracts.model import Model, ModelCache, ModelInfo, TensorSource, Weights
from enginebay.ops.attention import ATTENTION
from enginebay.ops.bound import Ops
from enginebay.ops.caps import Env
from enginebay.ops.linear import EMBEDDING, LINEAR
from enginebay.ops.spec import AttnBatch, AttnSpec, Bucket
from enginebay.weights import WeightSpec
from enginebay_native.attention import attention as native_attention
from enginebay_testing.model_harness import Chunk, ModelHarness, place_over, random_tensor
from enginebay_xla.layout import HndLayout
from tests.parity.ops import plain_ops

VOCAB, HEADS, SIZE, CAPACITY = 32, 4, 16, 16
HIDDEN = HEADS * SIZE
GROUPS = ("near", "far")
SPEC = AttnSpec(HEADS, HEADS, SIZE, inputs=("slopes",), return_lse=True)
SPECS = {"near": SPEC, "far": dataclasses.replace(SPEC, scale=0.1)}
SLOPES = 2.0 ** -np.arange(1, 1 + HEADS, dtype=np.float32)


class TwoMemories(Model):
    """Each token has a key and a value in either of two caches; a query's softmax is over both."""

    info = ModelInfo(
        "two_memories",
        VOCAB,
        HIDDEN,
        CAPACITY,
        tuple(CacheGroup(name, 1, HEADS, SIZE, SIZE) for name in GROUPS),
        SPECS,
    )

    def weight_specs(self) -> dict[str, WeightSpec]:
        heads = WeightSpec((HEADS, SIZE, HIDDEN), ("kv_heads", None, None), 1)
        specs = {f"{g}.{x}": heads for g in GROUPS for x in "qkv"}
        specs["slopes"] = WeightSpec((HEADS,), ("kv_heads",))
        return {"embed": WeightSpec((VOCAB, HIDDEN), (None, None), 1), **specs}

    def tensor_sources(self) -> dict[str, TensorSource]:
        return {}

    def hidden(
        self,
        weights: Weights,
        ops: Ops,
        token_ids: jax.Array,
        cache: ModelCache,
        batches: Mapping[str, AttnBatch],
    ) -> tuple[jax.Array, dict[str, tuple[CacheArrays, ...]]]:
        x = ops[EMBEDDING](weights["embed"], token_ids)
        outs, sums = [], []
        after: dict[str, tuple[CacheArrays, ...]] = {}
        slopes: Any = weights["slopes"]
        for group, spec in SPECS.items():
            q, k, v = (ops[LINEAR](x, weights[f"{group}.{name}"]) for name in "qkv")
            out, arrays, lse = ops[ATTENTION](
                *(q, k, v, cache[group][0], batches[group]), spec=spec, inputs={"slopes": slopes}
            )
            assert lse is not None, "the spec has return_lse"
            outs.append(out)
            sums.append(lse)
            after[group] = (arrays,)
        shares = jax.nn.softmax(jnp.stack(sums), axis=0)
        merged = (jnp.stack(outs) * shares[..., None]).sum(axis=0)
        return merged.reshape(x.shape), after

    def logits(self, weights: Weights, ops: Ops, hidden: jax.Array) -> jax.Array:
        return ops[LINEAR](hidden, weights["embed"], out_dtype=jnp.float32)


TENSORS = {
    name: SLOPES if name == "slopes" else random_tensor(name, spec.shape, 0)
    for name, spec in TwoMemories().weight_specs().items()
}


def by_numpy(token_ids: list[int]) -> np.ndarray:
    """Logits [tokens, vocab] in float64, of one softmax over the keys of both memories."""
    t = {name: array.astype(np.float64) for name, array in TENSORS.items()}
    x = t["embed"][token_ids]
    places = np.arange(len(token_ids))
    away = places[None] - places[:, None]
    scores, values = [], []
    for group, spec in SPECS.items():
        q, k, v = (np.einsum("ti,hdi->htd", x, t[f"{group}.{name}"]) for name in "qkv")
        products = q @ k.transpose(0, 2, 1) * spec.softmax_scale
        scores.append(np.where(away > 0, -np.inf, products + t["slopes"][:, None, None] * away))
        values.append(v)
    both = np.concatenate(scores, axis=-1)
    weights = np.exp(both - both.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    out = weights @ np.concatenate(values, axis=1)
    merged: np.ndarray = out.transpose(1, 0, 2).reshape(x.shape) @ t["embed"].T
    return merged


@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_model_merges_two_attentions_with_slopes_by_their_log_sum_exp(num_devices: int) -> None:
    """Two prompts, of which one goes on by a chunk beside a token of the other."""
    model, placement = TwoMemories(), place_over(num_devices)
    weights = {
        name: jax.device_put(array, placement.weight(name, model.weight_specs()[name]))
        for name, array in TENSORS.items()
    }
    harness = ModelHarness(model, weights, plain_ops, placement, num_rows=2, capacity=CAPACITY)
    rows = [[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8]]
    bucket = Bucket(10, 2, 1, 5, CAPACITY, "mixed")
    first = harness.run([Chunk(0, 0, rows[0][:4]), Chunk(1, 0, rows[1][:4])], bucket)
    last = harness.run([Chunk(1, 4, rows[1][4:]), Chunk(0, 4, rows[0][4:])], bucket)
    for row, parts in zip(rows, ((first[0], last[1]), (first[1], last[0])), strict=True):
        np.testing.assert_allclose(np.concatenate(parts), by_numpy(row), rtol=2e-5, atol=2e-5)


def test_a_kernel_without_the_feature_is_refused_with_the_reason() -> None:
    bucket = Bucket(2, 2, 1, 1, 16, "decode")
    layout = HndLayout(2, 16, HEADS, SIZE, "float32")
    reason = native_attention.caps.why_not(Env("cpu"), SPEC, bucket, layout)
    assert reason == "does not support features alibi"
