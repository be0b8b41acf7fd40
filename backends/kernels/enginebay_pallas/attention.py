"""The op attention on TPUs: ragged paged attention that also writes the new tokens to the cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from enginebay.contracts.cache import CacheArrays, KVLayout
from enginebay.errors import UnsupportedError
from enginebay.ops.caps import Caps, Env
from enginebay.ops.spec import AttnBatch, AttnSpec, Bucket
from enginebay_pallas import attention_config
from enginebay_pallas.attention_config import PallasAttentionConfig
from enginebay_pallas.attention_kernel import paged_attention
from enginebay_pallas.attention_plan import AttentionPlan, PlanTables
from enginebay_pallas.attention_units import (
    Units,
    chunk_units,
    pack_new,
    pack_queries,
    single_token_units,
    unpack_queries,
)
from enginebay_pallas.generations import SMALLEST, round_up, sublanes
from enginebay_pallas.interpret import interpreting
from enginebay_pallas.kv_write import PallasKvWrite

DTYPES = frozenset({"float32", "bfloat16"})
STORAGES = frozenset({"int8", "uint4", "fp8"})
"""Quantised caches that the kernel reads. The kernel of kv_write writes them."""

CAPS = Caps(
    platforms=frozenset({"tpu"}),
    layouts=("tpu_rpa",),
    q_dtypes=DTYPES,
    kv_dtypes=DTYPES | STORAGES,
    features=frozenset(
        {
            "window",
            "softcap",
            "sinks",
            "lse",
            "kv_share",
            "deterministic",
            "shard_map",
            "fused_write",
        }
    ),
    head_dim=lambda width: width <= 256,
    group=lambda group: group <= 16,
    page_size=lambda size: size <= 1024,
    ragged_decode=True,
)


@dataclasses.dataclass(frozen=True)
class PallasAttention:
    """Ragged paged attention; attention_kernel describes the algorithm.

    Each row's pages are read once, up to the row's length, into two alternating buffers. One kernel
    serves rows with one new token, another rows with several; a mixed step runs both. Sums are f32.
    Their order depends on the row's positions and the block sizes only. `is_interpreted` runs the
    kernels on the host.
    """

    name: str = "pallas"
    version: str = "2"
    priority: int = 20
    caps: Caps = CAPS
    is_interpreted: bool = False

    def interpreted(self) -> PallasAttention:
        """Return the same kernels, run by Pallas' TPU interpreter with its race detector."""
        return dataclasses.replace(
            self,
            is_interpreted=True,
            caps=dataclasses.replace(CAPS, platforms=frozenset({"cpu"})),
        )

    def default_config(
        self, env: Env, spec: AttnSpec, bucket: Bucket, layout: KVLayout
    ) -> PallasAttentionConfig:
        """Return block sizes for the TPU generation and the shapes."""
        return attention_config.default_config(env, spec, bucket, layout)

    def candidates(
        self, env: Env, spec: AttnSpec, bucket: Bucket, layout: KVLayout
    ) -> Sequence[PallasAttentionConfig]:
        """Return block sizes to time; all fit the memory of the generation."""
        return attention_config.attention_candidates(env, spec, bucket, layout)

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
        config: PallasAttentionConfig,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, CacheArrays, jax.Array | None]:
        """Return (out [T, Hq, D] in q's dtype, cache, log-sum-exp f32 [T, Hq] or None).

        AttentionImpl describes the arguments.
        """
        if spec.v_head_dim not in (None, spec.head_dim):
            given = f"v_head_dim {spec.v_head_dim}"
            allowed = f"v_head_dim {spec.head_dim}, the same as head_dim"
            raise UnsupportedError(given, allowed, "Choose another kernel.")
        mode = batch.bucket.mode
        if layout.storage is not None and k is not None and v is not None:
            cache = PallasKvWrite(self.is_interpreted)(cache, batch.slots, k, v, layout)
            k = v = None
        new = None if k is None or v is None else pack_new(k, v, layout, layout.page_size)
        call = AttentionCall(spec, layout, config, self.is_interpreted)
        names = tuple(layout.shapes())
        kv = tuple(cache[name] for name in names)
        if mode == "decode":
            out, lse, kv = call(single_token_units(batch), q, new, kv, batch)
        elif mode == "prefill":
            out, lse, kv = call(chunk_units(batch, config.block_q), q, new, kv, batch)
        else:
            num_decode = batch.distribution[0]
            first = call(single_token_units(batch, num_decode), q, new, kv, batch)
            others = call(chunk_units(batch, config.block_q, num_decode), q, new, first[2], batch)
            is_first = jnp.arange(batch.bucket.tokens)[:, None] < num_decode
            out = jnp.where(is_first[..., None], first[0], others[0])
            lse = jnp.where(is_first, first[1], others[1])
            kv = others[2]
        real = (batch.seq_ids < batch.bucket.seqs)[:, None]
        if sinks is not None:
            with_sink = jnp.logaddexp(lse, sinks.astype(jnp.float32))
            out = out * jnp.exp(lse - with_sink)[..., None]
            lse = with_sink
        out = jnp.where(real[..., None], out, 0.0).astype(q.dtype)
        return (
            out,
            dict(zip(names, kv, strict=True)),
            jnp.where(real, lse, 0.0) if spec.return_lse else None,
        )


def check_table(bucket: Bucket, page_size: int) -> None:
    """Raise UnsupportedError when a bucket's page table takes over half of the scalar memory."""
    room = SMALLEST.smem_bytes // 2  # the size on every generation
    size = 4 * bucket.seqs * bucket.pages_per_seq
    if size > room:
        fitting = page_size
        while size * page_size > room * fitting:
            fitting *= 2
        raise UnsupportedError(
            f"a page table of {bucket.seqs} rows of {bucket.pages_per_seq} pages: {size >> 10} KiB",
            f"{room >> 10} KiB in the scalar memory of a TPU",
            f"Use pages of {fitting} tokens (they are {page_size}), "
            "fewer rows or a shorter max_model_len.",
        )


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """One kernel over units of work; it packs the tokens into units and unpacks the results."""

    spec: AttnSpec
    layout: KVLayout
    config: PallasAttentionConfig
    is_interpreted: bool

    def __call__(
        self,
        units: Units,
        q: jax.Array,
        new: jax.Array | None,
        kv: tuple[jax.Array, ...],
        batch: AttnBatch,
    ) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]:
        """Return (out [T, Hq, D], log-sum-exp f32 [T, Hq] or 0 where it is not needed, cache)."""
        spec, config = self.spec, self.config
        check_table(batch.bucket, self.layout.page_size)
        one_token = units.tokens.shape[1] == 1
        block_q = units.tokens.shape[1]
        plan = AttentionPlan(
            spec,
            page_size=self.layout.page_size,
            pages_per_seq=batch.bucket.pages_per_seq,
            block_q=block_q,
            rows=round_up(spec.group * block_q, sublanes(spec.q_dtype)),
            block_kv=config.decode_block_kv if one_token else config.block_kv,
            chunk_kv=config.chunk_kv,
            vmem_limit_bytes=config.vmem_limit_bytes,
            one_token=one_token,
            no_prefix=new is not None,
            unroll_heads=1,
            is_wide=spec.return_lse or "sinks" in spec.inputs,
            storage=self.layout.storage,
            is_interpreted=self.is_interpreted,
        )
        tables = PlanTables(
            units.rows, units.first, batch.cu_q_lens, batch.kv_lens, batch.page_table.reshape(-1)
        )
        run = interpreting(paged_attention) if self.is_interpreted else paged_attention
        packed = pack_queries(q.astype(spec.kv_dtype), units, spec.num_kv_heads, plan.rows)
        out, lse, kv = run(plan, tables, units.num_real, packed, new, kv)
        out = unpack_queries(out, units, spec.group, spec.head_dim)
        if lse is None:
            return out, jnp.zeros(out.shape[:2], jnp.float32), kv
        return out, unpack_queries(lse[..., None], units, spec.group, 1)[..., 0], kv


attention = PallasAttention()
