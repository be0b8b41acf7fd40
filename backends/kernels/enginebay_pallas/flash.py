"""Attention of prompts without a prefix on TPUs. All keys are new, so no page is read.

Flash attention (Dao et al., arXiv 2205.14135) over packed rows. Each token sees the tokens from the
first one of its row, or of its window, up to itself. These two indices per token mask rows and
windows alike, and blocks of keys that no token sees are skipped. All keys and values of a head stay
in VMEM while the blocks of its queries are computed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from enginebay.contracts.cache import CacheArrays, KVLayout
from enginebay.errors import UnsupportedError
from enginebay.ops.caps import Caps, Env
from enginebay.ops.spec import AttnBatch, AttnSpec, Bucket
from enginebay_pallas.generations import LANES, MIB, generation, round_up
from enginebay_pallas.interpret import interpreting
from enginebay_pallas.kv_write import LAYOUT, PallasKvWrite

DTYPES = frozenset({"float32", "bfloat16"})

MASKED = -1e30
"""Score of a masked key. It is finite, so that the difference of two is 0 and not NaN."""

CAPS = Caps(
    platforms=frozenset({"tpu"}),
    layouts=(LAYOUT,),
    modes=frozenset({"prefill"}),
    q_dtypes=DTYPES,
    kv_dtypes=DTYPES,
    features=frozenset({"window", "softcap", "deterministic", "fused_write", "shard_map"}),
    head_dim=lambda width: width <= 256,
    group=lambda group: group <= 16,
)


@dataclasses.dataclass(frozen=True)
class PallasFlashConfig:
    """Tokens per block of queries and per block of keys, and the VMEM limit in bytes."""

    block_q: int
    block_kv: int
    vmem_limit_bytes: int


@dataclasses.dataclass(frozen=True)
class PallasFlashAttention:
    """Attention of phase prefill; the kernel of kv_write writes the new tokens to the cache."""

    name: str = "pallas_flash"
    version: str = "1"
    priority: int = 10
    caps: Caps = CAPS
    is_interpreted: bool = False

    def interpreted(self) -> PallasFlashAttention:
        """Return the same kernels, run by Pallas' TPU interpreter with its race detector."""
        caps = dataclasses.replace(self.caps, platforms=frozenset({"cpu"}))
        return dataclasses.replace(self, is_interpreted=True, caps=caps)

    def default_config(
        self, env: Env, spec: AttnSpec, bucket: Bucket, layout: KVLayout
    ) -> PallasFlashConfig:
        """Return the largest blocks that fit, of at most 512 rows of queries.

        Raises UnsupportedError when none fits.
        """
        able = [
            c
            for c in self.candidates(env, spec, bucket, layout)
            if c.block_q * spec.group <= 512 or c.block_q == 16
        ]
        if not able:
            raise UnsupportedError(
                f"a step of {bucket.tokens} tokens with head_dim {spec.head_dim}",
                "steps where the keys and values of one head fit into VMEM",
                "Lower max_num_batched_tokens or choose another kernel.",
            )
        return max(able, key=lambda c: (c.block_q, c.block_kv))

    def candidates(
        self, env: Env, spec: AttnSpec, bucket: Bucket, layout: KVLayout
    ) -> Sequence[PallasFlashConfig]:
        """Blocks that fit the generation's memory, and are no larger than the step."""
        limit = generation(env.arch).vmem_limit_bytes
        tokens = round_up(bucket.tokens, LANES)
        return [
            PallasFlashConfig(block_q, block_kv, limit)
            for block_q in (16, 32, 64, 128, 256)
            for block_kv in (128, 256, 512, 1024)
            if max(block_q, block_kv) <= tokens
            and _vmem_bytes(spec, tokens, block_q, block_kv) <= limit
        ]

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
        config: PallasFlashConfig,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, CacheArrays, jax.Array | None]:
        """Return (out [T, Hq, D] in q's dtype, cache, None); see AttentionImpl.

        The q_len of every row equals its kv_len.
        """
        if k is None or v is None or sinks is not None:
            given = "a step without new keys and values, or with sinks"
            raise UnsupportedError(
                given, "new keys and values, without sinks", "Choose another kernel for prefill."
            )
        cache = PallasKvWrite(self.is_interpreted)(cache, batch.slots, k, v, layout)
        run = interpreting(_attend) if self.is_interpreted else _attend
        # Round keys and values as the cache does.
        dtype = jnp.dtype(spec.kv_dtype)
        real = (batch.seq_ids < batch.bucket.seqs)[:, None, None]
        values = jnp.where(real, v, 0.0).astype(dtype)  # 0 * NaN is NaN, so padding is 0
        out = run(q.astype(dtype), k.astype(dtype), values, *_seen(batch, spec), spec, config)
        return jnp.where(real, out, 0.0).astype(q.dtype), cache, None


def _vmem_bytes(spec: AttnSpec, tokens: int, block_q: int, block_kv: int) -> int:
    """Estimate the VMEM in bytes.

    It has two copies of a head's keys and values and of a block of queries, and about four of the
    f32 scores.
    """
    size = jnp.dtype(spec.kv_dtype).itemsize
    width, rows = round_up(spec.head_dim, LANES), block_q * spec.group
    whole = 2 * 2 * tokens * width * size
    queries = 2 * rows * (2 * width * 4 + 2 * LANES * 4)
    return whole + queries + 4 * rows * (block_kv + width) * 4 + MIB


def _seen(batch: AttnBatch, spec: AttnSpec) -> tuple[jax.Array, jax.Array]:
    """Return the packed indices of the first and the last token that each token sees.

    Both are int32 [T]. A padding token sees itself.
    """
    index = jnp.arange(batch.bucket.tokens, dtype=jnp.int32)
    row = jnp.minimum(batch.seq_ids, batch.bucket.seqs - 1)
    first, last = batch.cu_q_lens[row], index if spec.causal else batch.cu_q_lens[row + 1] - 1
    if spec.window is not None:
        first = jnp.maximum(first, index - (spec.window - 1))
    real = batch.seq_ids < batch.bucket.seqs
    return jnp.where(real, first, index), jnp.where(real, last, index)


def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    first: jax.Array,
    last: jax.Array,
    spec: AttnSpec,
    config: PallasFlashConfig,
) -> jax.Array:
    """Return [T, Hq, D] in the spec's dtype.

    q is [T, Hq, D], k and v are [T, Hkv, D], first and last int32 [T].
    """
    tokens, heads, group, width = q.shape[0], spec.num_kv_heads, spec.group, spec.head_dim
    more = -tokens % max(config.block_q, config.block_kv)
    total, rows = tokens + more, config.block_q * group
    q, k, v = (jnp.pad(x, ((0, more), (0, 0), (0, 0))) for x in (q, k, v))
    added = jnp.arange(tokens, total, dtype=jnp.int32)
    first, last = jnp.concatenate([first, added]), jnp.concatenate([last, added])
    begins = first.reshape(-1, config.block_q).min(axis=1) // config.block_kv
    ends = last.reshape(-1, config.block_q).max(axis=1) // config.block_kv + 1
    queries = q.reshape(total, heads, group, width).transpose(1, 0, 2, 3).reshape(heads, -1, width)
    keys, values = (x.transpose(1, 0, 2) for x in (k, v))
    by_row = pl.BlockSpec((rows, 1), lambda _h, i, *_: (i, 0))
    by_query = pl.BlockSpec((1, rows, width), lambda h, i, *_: (h, i, 0))
    whole = pl.BlockSpec((1, total, width), lambda h, *_: (h, 0, 0))
    out = pl.pallas_call(
        functools.partial(_kernel, spec=spec, config=config),
        out_shape=jax.ShapeDtypeStruct(queries.shape, spec.q_dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(heads, total // config.block_q),
            in_specs=[by_row, by_row, by_query, whole, whole],
            out_specs=by_query,
        ),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=config.vmem_limit_bytes),
        name="flash_attention",
    )(begins, ends, *(jnp.repeat(x, group)[:, None] for x in (first, last)), queries, keys, values)
    out = out.reshape(heads, total, group, width).transpose(1, 0, 2, 3)
    return out.reshape(total, heads * group, width)[:tokens]


def _kernel(
    begins: Any,
    ends: Any,
    first: Any,
    last: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    *,
    spec: AttnSpec,
    config: PallasFlashConfig,
) -> None:
    """Compute one block of queries. The rows are the block's tokens times query heads.

    first and last are int32 [rows, 1], q and out [1, rows, D], k and v [1, T, D].
    """
    block, size = pl.program_id(1), config.block_kv
    queries, lowest, highest = q[0], first[...], last[...]
    precision = lax.Precision.HIGHEST if spec.kv_dtype == "float32" else lax.Precision.DEFAULT
    dot = functools.partial(
        lax.dot_general, precision=precision, preferred_element_type=jnp.float32
    )

    def add(i: Any, state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        most, total, sums = state
        here = pl.ds(pl.multiple_of(i * size, size), size)
        scores = dot(queries, k[0, here, :], (((1,), (1,)), ((), ()))) * spec.softmax_scale
        if spec.softcap is not None:
            scores = spec.softcap * jnp.tanh(scores / spec.softcap)
        key = i * size + lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        seen = (key >= lowest) & (key <= highest)
        scores = jnp.where(seen, scores, MASKED)
        now = jnp.maximum(most, scores.max(axis=1, keepdims=True))
        weights = jnp.where(seen, jnp.exp(scores - now), 0.0)
        kept = jnp.exp(most - now)
        values = v[0, here, :]
        fresh = dot(weights.astype(values.dtype), values, (((1,), (0,)), ((), ())))
        return now, total * kept + weights.sum(axis=1, keepdims=True), sums * kept + fresh

    rows = queries.shape[0]
    start = (
        jnp.full((rows, 1), MASKED, jnp.float32),
        jnp.zeros((rows, 1), jnp.float32),
        jnp.zeros(queries.shape, jnp.float32),
    )
    _, total, sums = lax.fori_loop(begins[block], ends[block], add, start)
    out[0] = (sums / total).astype(out.dtype)


flash_attention = PallasFlashAttention()
