"""Signatures of the built-in ops, and what all their implementations have in common."""

from __future__ import annotations

from typing import Any, Protocol

import jax

from enginebay.cache import CacheArrays, KVLayout
from enginebay.ops.op import Op
from enginebay.ops.spec import AttnBatch, AttnSpec
from enginebay.weights import Weight
from enginebay_numerics.rotary import RopeSpec

CLOSE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}
ANGLES = {**CLOSE, "float32": 1e-3}
"""Tolerance of rope: the rounding error of an f32 angle of thousands of radians."""


class AttentionOp(Protocol):
    """Attention as a model calls it. Implementation, layout, sharding and phase are chosen already.

    rope: the op first rotates q and k to batch.positions; a kernel may fuse this with the write to
    the cache. None: q and k are rotated already. k, v: None in a layer that reads the cache of
    another layer (spec.kv_shared). sinks: f32 [Hq] for a spec with `sinks`, one additional score
    per query head that takes part in the softmax but has no value. slopes: f32 [Hq] for a spec with
    `alibi`.

    The last result is the log-sum-exp f32 [T, Hq] for a spec with `return_lse`, and None otherwise.
    With it a model can merge the attention over two caches.
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
        sinks: jax.Array | None = None,
        slopes: jax.Array | None = None,
    ) -> tuple[jax.Array, CacheArrays, jax.Array | None]: ...


class RopeOp(Protocol):
    """Rotates the first rotary_dim features of x [T, heads, head_dim] to positions int32 [T]."""

    def __call__(self, x: jax.Array, positions: jax.Array, *, spec: RopeSpec) -> jax.Array: ...


class RopeKvWriteOp(Protocol):
    """Rotates q [T, q_heads, head_dim] and k [T, kv_heads, head_dim], and writes k and v [T,
    kv_heads, head_dim] to the cache. Returns (rotated q, updated cache).

    A fused op of rope and kv_write, used with attention that does not write the cache itself.
    positions and slots are int32 [T]. Tokens with a negative slot are not written. The capability
    `layouts` of an implementation lists its cache layouts; without it, all layouts.
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
    """Samples one token of each row after the filters top_k, top_p and min_p. A sampler with the
    capability `draws` calls it.

    z: f32 [S, vocab], (logits - the row's max) / temperature, so that the max is 0; -inf is never
    sampled. seeds: uint32 [S, 2]. top_k: int32 [S], 1 to vocab; vocab keeps all tokens. top_p: f32
    [S]; 1 keeps all tokens. min_p: f32 [S]; 0 keeps all tokens. Returns int32 [S]: the kept token
    with the largest z + sampling.gumbel_noise(seeds, id); the lowest id if several are equal.

    The filters are applied in this order. top_k keeps the tokens whose z is at least the top_k-th
    largest z. top_p sorts these by exp(z), equal ones by id, and keeps each token before which less
    than the share top_p of the total of exp(z) lies; the border may be wrong by 1e-6 of the total.
    min_p keeps tokens with exp(z) >= min_p. The first token with the largest z is always kept, and
    a row with top_k 1 returns it whatever the noise is. Rows are independent.
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


class KvWriteOp(Protocol):
    """Writes k and v [T, kv_heads, head_dim] at slots int32 [T] of the cache, in place when it is
    donated. Tokens with a negative slot are dropped.

    An implementation lists its cache layouts in the capability `layouts`; without it, all layouts.
    """

    def __call__(
        self, cache: CacheArrays, slots: jax.Array, k: jax.Array, v: jax.Array, *, layout: KVLayout
    ) -> CacheArrays: ...


class EmbeddingOp(Protocol):
    """Returns rows of table [vocab, features] for ids int32 [T]: [T, features].

    The dtype is that of the table, or f32 for a quantised table.
    """

    def __call__(self, table: Weight, ids: jax.Array) -> jax.Array: ...


class LinearOp(Protocol):
    """Returns x [T, *in_dims] times weight [*out_dims, *in_dims]: [T, *out_dims], summed in f32.

    All dimensions of x but the first are contracted with the last dimensions of the weight.
    `out_dtype` None is x's dtype.
    """

    def __call__(
        self,
        x: jax.Array,
        weight: Weight,
        bias: jax.Array | None = None,
        *,
        out_dtype: Any = None,
    ) -> jax.Array: ...


class GroupedLinearOp(Protocol):
    """Multiplies rows, sorted by group, with the weight of their group; sums are f32.

    x is [T, inputs], weight [groups, outputs, inputs], group_sizes int32 [groups]; the result is
    [T, outputs]. The first group_sizes[0] rows are multiplied with weight[0], and so on. Rows after
    the last group give 0. Rows are independent. `out_dtype` None is x's dtype.
    """

    def __call__(
        self, x: jax.Array, weight: Weight, group_sizes: jax.Array, *, out_dtype: Any = None
    ) -> jax.Array: ...


class ShortConvOp(Protocol):
    """A causal convolution: returns (out [T, channels] in x's dtype, the state after the tokens).

    x is [T, channels], weight [channels, taps], bias [channels]; sums are f32. The output of a
    token is the sum of the last `taps` inputs of its row up to the token, each times its column of
    the weight. Inputs before position 0 are 0. The state's array "inputs" [places, taps - 1,
    channels] has the last inputs of a row, oldest first, at place batch.page_table[row, 0]. Rows of
    length 0 are padding; no place is written for them.
    """

    def __call__(
        self,
        x: jax.Array,
        weight: jax.Array,
        bias: jax.Array | None,
        state: CacheArrays,
        batch: AttnBatch,
    ) -> tuple[jax.Array, CacheArrays]: ...


class RmsNormOp(Protocol):
    """Returns x [..., features] / rms(x) * weight [features] in x's dtype; statistics are f32."""

    def __call__(self, x: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array: ...


class AddRmsNormOp(Protocol):
    """Returns (rms_norm(x + residual), x + residual), both [..., features] in x's dtype.

    This op is fused: without an implementation, a sum and the op rms_norm are used. The sum is
    rounded to x's dtype before the norm. weight is [features].
    """

    def __call__(
        self, x: jax.Array, residual: jax.Array, weight: jax.Array, *, eps: float
    ) -> tuple[jax.Array, jax.Array]: ...


class AllReduceOp(Protocol):
    """Inside shard_map over the mesh axes `axes`: returns the sum of all devices' x."""

    def __call__(self, x: jax.Array, *, axes: tuple[str, ...]) -> jax.Array: ...


class AllGatherOp(Protocol):
    """Inside shard_map over the mesh axes `axes`: concatenates all devices' x along `dim`."""

    def __call__(self, x: jax.Array, *, axes: tuple[str, ...], dim: int) -> jax.Array: ...


class AllToAllOp(Protocol):
    """Inside shard_map over the mesh axes `axes`: sends one piece of x to each device.

    The first axis of x is cut into one piece per device. Returns the pieces that this device
    receives, in the order of the devices.
    """

    def __call__(self, x: jax.Array, *, axes: tuple[str, ...]) -> jax.Array: ...


ALL_REDUCE: Op[AllReduceOp] = Op(
    "all_reduce",
    AllReduceOp,
    "enginebay_xla.collectives:all_reduce_reference",
    "enginebay_xla.quick_cases:all_reduce_cases",
    CLOSE,
    kit="enginebay_xla.kit.collectives:ALL_REDUCE",
)
ALL_GATHER: Op[AllGatherOp] = Op(
    "all_gather",
    AllGatherOp,
    "enginebay_xla.collectives:all_gather_reference",
    "enginebay_xla.quick_cases:all_gather_cases",
    {},
    kit="enginebay_xla.kit.collectives:ALL_GATHER",
)
ALL_TO_ALL: Op[AllToAllOp] = Op(
    "all_to_all",
    AllToAllOp,
    "enginebay_xla.collectives:all_to_all_reference",
    "enginebay_xla.quick_cases:all_to_all_cases",
    {},
    kit="enginebay_xla.kit.collectives:ALL_TO_ALL",
)
ATTENTION: Op[AttentionOp] = Op(
    "attention",
    AttentionOp,
    "enginebay_xla.attention:xla_attention",
    "enginebay_xla.attention_quick:quick_attention_cases",
    CLOSE,
    calls=("rope", "kv_write", "rope_kv_write"),
    kit="enginebay_testing.attention_suite:KIT",
    bench="enginebay_bench.attention:BENCH",
)
LINEAR: Op[LinearOp] = Op(
    "linear",
    LinearOp,
    "enginebay_xla.linear:linear",
    "enginebay_xla.quick_cases:linear_cases",
    CLOSE,
    reads_weights=True,
    kit="enginebay_xla.kit.kits:LINEAR",
    bench="enginebay_xla.bench.plain:LINEAR",
    cost="enginebay_xla.cost:linear_cost",
    oracle="enginebay_testing.oracle:linear",
    partition="enginebay_xla.partition:linear",
)
EMBEDDING: Op[EmbeddingOp] = Op(
    "embedding",
    EmbeddingOp,
    "enginebay_xla.linear:embedding",
    "enginebay_xla.quick_cases:embedding_cases",
    {},
    reads_weights=True,
    kit="enginebay_xla.kit.kits:EMBEDDING",
    bench="enginebay_xla.bench.plain:EMBEDDING",
    cost="enginebay_xla.cost:embedding_cost",
    partition="enginebay_xla.partition:embedding",
)
GROUPED_LINEAR: Op[GroupedLinearOp] = Op(
    "grouped_linear",
    GroupedLinearOp,
    "enginebay_xla.grouped_linear:grouped_linear_reference",
    "enginebay_xla.quick_cases:grouped_linear_cases",
    CLOSE,
    reads_weights=True,
    kit="enginebay_xla.kit.kits:GROUPED_LINEAR",
    bench="enginebay_xla.bench.plain:GROUPED_LINEAR",
    cost="enginebay_xla.cost:grouped_linear_cost",
    oracle="enginebay_testing.oracle:grouped_linear",
    partition="enginebay_xla.partition:grouped_linear",
)
SHORT_CONV: Op[ShortConvOp] = Op(
    "short_conv",
    ShortConvOp,
    "enginebay_xla.short_conv:short_conv_reference",
    "enginebay_xla.quick_cases:short_conv_cases",
    CLOSE,
    kit="enginebay_xla.kit.kits:SHORT_CONV",
    bench="enginebay_xla.bench.states:SHORT_CONV",
    cost="enginebay_xla.cost:short_conv_cost",
)
RMS_NORM: Op[RmsNormOp] = Op(
    "rms_norm",
    RmsNormOp,
    "enginebay_xla.norm:rms_norm",
    "enginebay_xla.quick_cases:rms_norm_cases",
    CLOSE,
    kit="enginebay_xla.kit.kits:RMS_NORM",
    bench="enginebay_xla.bench.plain:RMS_NORM",
    cost="enginebay_xla.cost:rms_norm_cost",
    oracle="enginebay_testing.oracle:rms_norm",
    partition="enginebay_xla.partition:rms_norm",
)
ROPE: Op[RopeOp] = Op(
    "rope",
    RopeOp,
    "enginebay_xla.rope:rope",
    "enginebay_xla.quick_cases:rope_cases",
    ANGLES,
    kit="enginebay_xla.kit.kits:ROPE",
    bench="enginebay_xla.bench.plain:ROPE",
    cost="enginebay_xla.cost:rope_cost",
    oracle="enginebay_testing.oracle:rope",
)
KV_WRITE: Op[KvWriteOp] = Op(
    "kv_write",
    KvWriteOp,
    "enginebay_xla.kv_write:kv_write",
    "enginebay_xla.quick_cases:kv_write_cases",
    {},
    kit="enginebay_xla.kit.kits:KV_WRITE",
    bench="enginebay_xla.bench.plain:KV_WRITE",
    cost="enginebay_xla.cost:kv_write_cost",
)
SAMPLE: Op[SampleOp] = Op(
    "sample",
    SampleOp,
    "enginebay_xla.sample:sample",
    "enginebay_xla.quick_cases:sample_cases",
    {},
    kit="enginebay_xla.kit.kits:SAMPLE",
    bench="enginebay_xla.bench.fused:SAMPLE",
    cost="enginebay_xla.cost:sample_cost",
    partition="enginebay_xla.partition:sample",
)

ADD_RMS_NORM: Op[AddRmsNormOp] = Op(
    "add_rms_norm",
    AddRmsNormOp,
    "enginebay_xla.norm:add_rms_norm",
    "enginebay_xla.quick_cases:add_rms_norm_cases",
    CLOSE,
    made_of=("rms_norm",),
    composed="enginebay_xla.norm:composed_add_rms_norm",
    kit="enginebay_xla.kit.kits:ADD_RMS_NORM",
    bench="enginebay_xla.bench.fused:ADD_RMS_NORM",
    cost="enginebay_xla.cost:add_rms_norm_cost",
    partition="enginebay_xla.partition:add_rms_norm",
)
ROPE_KV_WRITE: Op[RopeKvWriteOp] = Op(
    "rope_kv_write",
    RopeKvWriteOp,
    "enginebay_xla.rope_kv_write:rope_kv_write",
    "enginebay_xla.quick_cases:rope_kv_write_cases",
    ANGLES,
    made_of=("rope", "kv_write"),
    composed="enginebay_xla.rope_kv_write:composed_rope_kv_write",
    kit="enginebay_xla.kit.kits:ROPE_KV_WRITE",
    bench="enginebay_xla.bench.fused:ROPE_KV_WRITE",
    cost="enginebay_xla.cost:rope_kv_write_cost",
)
