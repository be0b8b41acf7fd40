"""The frame of attention kernels for which it is chosen apart how keys are read, and how a softmax
is summed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from enginebay.contracts.cache import CacheArrays, KVLayout
from enginebay.errors import UnsupportedError
from enginebay.ops.caps import Caps, Env
from enginebay.ops.spec import AttnBatch, AttnSpec, Bucket
from tests.zoo.right import softmaxes
from tests.zoo.right.softmaxes import Result, Scores, SoftmaxWay

FLOATS = frozenset({"bfloat16", "float16", "float32"})
STORED = frozenset({"int8", "uint4", "fp8"})
LAYOUTS = ("hnd", "nhd", "tpu_rpa")
PLAIN = frozenset({"deterministic", "fused_write"})
USUAL = PLAIN | {"window", "softcap", "sinks", "lse", "kv_share"}
EVERY = USUAL | {"alibi", "mla", "mixed_dtypes"}


def caps(
    features: frozenset[str],
    *,
    layouts: tuple[str, ...] = LAYOUTS,
    modes: frozenset[str] = frozenset({"decode", "prefill", "mixed"}),
    kv_dtypes: frozenset[str] = FLOATS,
) -> Caps:
    """Capabilities of a kernel for any host."""
    return Caps(frozenset({"cpu"}), layouts, modes=modes, features=features, kv_dtypes=kv_dtypes)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Keys of a block; 1 where there are no blocks."""

    block: int = 1


class Queries(NamedTuple):
    """N queries of one row [N, Hkv, G, D], with their positions and, for each, the first and one
    past the last key that it sees, [N].
    """

    q: jax.Array
    position: jax.Array
    first: jax.Array
    end: jax.Array


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call. Queries [T, Hkv, G, D]; rows [T] within the bucket; `real` [T]: not padding; k and
    v as given; sinks and slopes f32 [Hkv, G].
    """

    queries: Queries
    row: jax.Array
    real: jax.Array
    fresh: tuple[jax.Array, jax.Array] | None
    cache: CacheArrays
    batch: AttnBatch
    spec: AttnSpec
    layout: KVLayout
    sinks: jax.Array | None
    slopes: jax.Array | None

    @property
    def length(self) -> int:
        """Keys that a row has room for."""
        return self.batch.bucket.pages_per_seq * self.layout.page_size


ReadWay = Callable[["Attention", Problem], Result]
"""Returns (out f32 [T, Hkv, G, Dv], log-sum-exp f32 [T, Hkv, G])."""

Product = Literal["one", "by head", "sums"]


@dataclasses.dataclass(frozen=True)
class Attention:
    """See the module. `exact`: stored values are read without rounding to the layout's dtype.
    `scale_first`: queries are scaled, not scores. `product`: scores by one product, by a product
    for each KV head, or by sums of products of numbers.
    """

    name: str
    caps: Caps
    reading: ReadWay
    softmax: SoftmaxWay = softmaxes.whole
    sizes: Sizes = Sizes()
    base2: bool = False
    exact: bool = False
    scale_first: bool = False
    product: Product = "one"
    version: str = "1"
    priority: int = 0

    def default_config(self, env: Env, spec: AttnSpec, bucket: Bucket, layout: KVLayout) -> Sizes:
        return self.sizes

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
        config: Sizes | None,
        sinks: jax.Array | None = None,
        slopes: jax.Array | None = None,
    ) -> tuple[jax.Array, CacheArrays, jax.Array | None]:
        if spec.v_dim != spec.head_dim and not spec.v_is_k_prefix:
            given = f"values of {spec.v_dim} numbers beside keys of {spec.head_dim}"
            raise UnsupportedError(given, "values as wide as keys", "Choose another kernel.")
        fresh = None
        if k is not None and v is not None:
            cache = layout.write(cache, batch.slots, k, v)
            fresh = k, v
        row = jnp.minimum(batch.seq_ids, batch.bucket.seqs - 1)
        real = batch.seq_ids < batch.bucket.seqs
        grouped = q.reshape(q.shape[0], spec.num_kv_heads, spec.group, spec.head_dim)
        per_head = [
            None if x is None else x.astype(jnp.float32).reshape(spec.num_kv_heads, spec.group)
            for x in (sinks, slopes)
        ]
        queries = visible_to(batch, spec, grouped.astype(jnp.float32), row)
        problem = Problem(queries, row, real, fresh, cache, batch, spec, layout, *per_head)
        out, lse = self.reading(self, problem)
        sees = real & (queries.end > queries.first)
        out = jnp.where(sees[:, None, None, None], out, 0.0)
        out = out.reshape(q.shape[0], spec.num_q_heads, spec.v_dim).astype(q.dtype)
        return out, cache, lse.reshape(q.shape[:2]) if spec.return_lse else None

    def attend(
        self,
        problem: Problem,
        queries: Queries,
        k: jax.Array,
        v: jax.Array,
        key_positions: jax.Array,
    ) -> Result:
        """The result of some queries over the keys k [L, Hkv, D] at `key_positions` [L]."""
        spec = problem.spec
        shown = (key_positions >= queries.first[:, None]) & (key_positions < queries.end[:, None])
        log2e = math.log2(math.e) if self.base2 else 1.0
        # A soft cap and slopes are for scores in units of e.
        is_plain = spec.softcap is None and problem.slopes is None
        factor = spec.softmax_scale * (log2e if is_plain else 1.0)
        q = queries.q * factor if self.scale_first else queries.q
        scores = self._products(q, k.astype(jnp.float32))
        scores = scores if self.scale_first else scores * factor
        if spec.softcap is not None:
            scores = spec.softcap * jnp.tanh(scores / spec.softcap)
        if problem.slopes is not None:
            back = (key_positions - queries.position[:, None]).astype(jnp.float32)
            scores = scores + problem.slopes[None, :, :, None] * back[:, None, None]
        scores = scores if is_plain else scores * log2e
        scores = jnp.where(shown[:, None, None], scores, -jnp.inf)
        values = jnp.where(shown.any(axis=0)[:, None, None], v, 0)
        sinks = None if problem.sinks is None else problem.sinks * log2e
        return self.softmax(Scores(scores, values, sinks, self.base2))

    def _products(self, q: jax.Array, k: jax.Array) -> jax.Array:
        """Queries [N, Hkv, G, D] times keys [L, Hkv, D]: [N, Hkv, G, L]."""
        if self.product == "sums":
            return (q[:, :, :, None] * k.swapaxes(0, 1)[None, :, None]).sum(axis=-1)
        highest = jax.lax.Precision.HIGHEST
        if self.product == "by head":
            heads = q.swapaxes(0, 1), k.swapaxes(0, 1)
            found = jax.lax.map(
                lambda one: jnp.einsum("ngd,ld->ngl", *one, precision=highest), heads
            )
            return found.swapaxes(0, 1)
        return jnp.einsum("nhgd,lhd->nhgl", q, k, precision=highest)

    def read(
        self, problem: Problem, row: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """k and v [L, Hkv, D] of a row at `positions` [L]; those past the table are its last."""
        size = problem.layout.page_size
        inside = jnp.minimum(positions, problem.length - 1)
        pages = problem.batch.page_table[row][inside // size]
        read = problem.layout.read_exact if self.exact else problem.layout.read_tokens
        return read(problem.cache, pages * size + inside % size)


def visible_to(batch: AttnBatch, spec: AttnSpec, q: jax.Array, row: jax.Array) -> Queries:
    """The queries with the keys that each sees, by causality and window."""
    end = batch.positions + 1
    if not spec.causal and spec.window is None:
        end = batch.kv_lens[row]
    first = jnp.zeros_like(end)
    if spec.window is not None:
        first = jnp.maximum(first, batch.positions - spec.window + 1)
    return Queries(q, batch.positions, first, end)
