"""Ops: the record of chosen implementations that the runner hands to a model. Models compute
through it only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import jax

from enginebay.cache import CacheArrays, KVLayout
from enginebay.ops.caps import Caps, Env
from enginebay.ops.spec import AttnBatch, AttnSpec, Bucket, RopeSpec


class AttentionImpl(Protocol):
    """An implementation of the attention op, registered as kind "kernel", op "attention".

    Semantics: write k and v [T, Hkv, D] of the new tokens into the cache at batch.slots, then let
    every token of q [T, Hq, D] attend to its row's first kv_lens positions under the spec's mask.
    Rows are independent. Output on padding tokens is 0, as is a row without any visible key. The
    cache comes back updated, in place when donated.
    """

    name: str
    version: str
    priority: int
    caps: Caps

    def default_config(self, env: Env, spec: AttnSpec, bucket: Bucket, layout: KVLayout) -> Any:
        """The frozen configuration (block sizes and such) to use when nothing better was tuned;
        None when it has none.
        """

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array | None,
        v: jax.Array | None,
        cache: CacheArrays,
        batch: AttnBatch,
        *,
        spec: AttnSpec,
        layout: KVLayout,
        config: Any,
        scales: jax.Array | None = None,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, CacheArrays, jax.Array | None]:
        """(out [T, Hq, Dv], cache, log-sum-exp f32 [T, Hq] or None)."""


class AttentionOp(Protocol):
    """Attention as a model calls it: implementation, layout, sharding and phase are already chosen.

    With `rope` q and k come as they are and are rotated to batch.positions first, in one with the
    write of the cache where a kernel does both. k and v are None in a layer that reads another's
    cache (spec.kv_shared).
    """

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array | None,
        v: jax.Array | None,
        cache: CacheArrays,
        batch: AttnBatch,
        *,
        spec: AttnSpec,
        rope: RopeSpec | None = None,
    ) -> tuple[jax.Array, CacheArrays]: ...


class EmbeddingOp(Protocol):
    """table [vocab, features], ids int32 [T] -> [T, features]."""

    def __call__(self, table: jax.Array, ids: jax.Array) -> jax.Array: ...


class LinearOp(Protocol):
    """x [T, *in_dims], weight [*out_dims, *in_dims] -> [T, *out_dims], accumulated in f32.

    The contracted dimensions are x's all but first, and as many last ones of the weight.
    `out_dtype` None keeps x's.
    """

    def __call__(
        self,
        x: jax.Array,
        weight: jax.Array,
        bias: jax.Array | None = None,
        *,
        out_dtype: Any = None,
    ) -> jax.Array: ...


class RmsNormOp(Protocol):
    """x [..., features], weight [features] -> x / rms(x) * weight, statistics in f32, x's dtype
    kept.
    """

    def __call__(self, x: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array: ...


class AddRmsNormOp(Protocol):
    """x, residual [..., features], weight [features] -> (rms_norm(x + residual), x + residual), x's
    dtype kept.

    Optional: without one, a sum and the op rms_norm. The sum is rounded to x's dtype before the
    norm sees it.
    """

    def __call__(
        self, x: jax.Array, residual: jax.Array, weight: jax.Array, *, eps: float
    ) -> tuple[jax.Array, jax.Array]: ...


class RopeOp(Protocol):
    """x [T, heads, head_dim], positions int32 [T] -> x with its first rotary_dim features rotated."""

    def __call__(self, x: jax.Array, positions: jax.Array, *, spec: RopeSpec) -> jax.Array: ...


class KvWriteOp(Protocol):
    """k, v [T, kv_heads, head_dim] put at slots int32 [T] of the cache; negative slots are dropped.
    In place when donated.

    The capability `layouts` names the cache layouts that it knows; without it, all of them.
    """

    def __call__(
        self, cache: CacheArrays, slots: jax.Array, k: jax.Array, v: jax.Array, *, layout: KVLayout
    ) -> CacheArrays: ...


class RopeKvWriteOp(Protocol):
    """q [T, q_heads, head_dim] and k, v [T, kv_heads, head_dim] -> (q rotated, the cache with k
    rotated and v in it).

    Optional: without one, the ops rope and kv_write. positions and slots are int32 [T]; what slots
    mean, and the capability `layouts`, are as in KvWriteOp. Used before attention that does not
    write the cache itself.
    """

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: CacheArrays,
        positions: jax.Array,
        slots: jax.Array,
        *,
        spec: RopeSpec,
        layout: KVLayout,
    ) -> tuple[jax.Array, CacheArrays]: ...


class SampleOp(Protocol):
    """A draw from what top_k, top_p and min_p leave of each row; samplers call it, see the
    capability `draws`.

    z f32 [S, vocab]: logits less the row's largest, over its temperature; so at most 0, and the
    largest is 0; -inf is never drawn. seeds uint32 [S, 2]. top_k int32 [S] in 1..vocab, which keeps
    all. top_p f32 [S]: 1 keeps all. min_p f32 [S]: 0 keeps all. Returns int32 [S]: the kept token
    of the largest z + sampling.gumbel_noise(seeds, id), the lowest id of equals.

    Kept are, in this order: tokens of at least the top_k-th largest z, all of its equals too; of
    their mass (sums of exp(z)) in descending order, equals by id, the tokens before which less than
    the share top_p lies; of these, those of exp(z) >= min_p. The first best is always kept, and a
    row of top_k 1 gets it, whatever the noise. A border of mass may be missed by 1e-6 of it. Rows
    are independent.
    """

    def __call__(
        self,
        z: jax.Array,
        seeds: jax.Array,
        *,
        top_k: jax.Array,
        top_p: jax.Array,
        min_p: jax.Array,
    ) -> jax.Array: ...


@dataclasses.dataclass(frozen=True)
class Ops:
    """The chosen implementation of each op that a model may call.

    `chosen` maps op (and "attention.decode" and so on per phase) to the implementation's name, for
    reports; "composed" stands for a fused op that others compute.
    """

    attention: AttentionOp
    embedding: EmbeddingOp
    linear: LinearOp
    rms_norm: RmsNormOp
    add_rms_norm: AddRmsNormOp
    rope: RopeOp
    chosen: Mapping[str, str]
