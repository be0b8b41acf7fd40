"""Ragged paged attention for TPUs, of `jax.experimental.pallas.ops.tpu`."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

from enginebay.contracts.cache import CacheArrays, KVLayout
from enginebay.errors import UnsupportedError
from enginebay.ops.caps import Caps, Env
from enginebay.ops.spec import AttnBatch, AttnSpec, Bucket

LANES = 128
CAPS = Caps(
    platforms=frozenset({"tpu"}),
    layouts=("tpu_rpa",),
    q_dtypes=frozenset({"bfloat16", "float32"}),
    kv_dtypes=frozenset({"bfloat16", "float32"}),
    features=frozenset({"window", "softcap", "kv_share", "deterministic"}),
    head_dim=lambda width: width == LANES,
)


@dataclasses.dataclass(frozen=True)
class RaggedBlocks:
    """Tokens of the cache, and queries, of a block."""

    block_kv: int = 512
    block_q: int = 32


@dataclasses.dataclass(frozen=True)
class RaggedPagedAttention:
    """Reads the cache by DMA, page by page; the op kv_write writes it before.

    UnsupportedError for numbers of KV heads that do not fill tiles of a TPU.
    """

    name: str = "jax_ragged_paged"
    version: str = "1"
    priority: int = -20
    caps: Caps = CAPS

    def interpreted(self) -> RaggedPagedAttention:
        """Raise UnsupportedError: JAX's interpreter cannot reshape references, as it does."""
        raise UnsupportedError(
            "the interpreted form of jax_ragged_paged",
            "a TPU, or --level compile",
            "Run it on a TPU: JAX's interpreter cannot reshape references, as it does.",
        )

    def default_config(
        self, env: Env, spec: AttnSpec, bucket: Bucket, layout: KVLayout
    ) -> RaggedBlocks:
        """Return the same sizes for all: JAX's table of sizes needs the TPU at hand."""
        return RaggedBlocks()

    def candidates(
        self, env: Env, spec: AttnSpec, bucket: Bucket, layout: KVLayout
    ) -> list[RaggedBlocks]:
        """Return block sizes to time."""
        return [RaggedBlocks(kv, q) for kv in (64, 256, 1024) for q in (16, 32, 128)]

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
        config: RaggedBlocks | None = None,
    ) -> tuple[jax.Array, CacheArrays, None]:
        """Return (out [T, Hq, D] in q's dtype, cache, None). See `enginebay.ops.attention`."""
        if not spec.causal:
            raise UnsupportedError(
                "attention to later tokens", "causal attention", "Choose another kernel."
            )
        kv, heads, packing = cache["kv"], 2 * spec.num_kv_heads, 4 // cache["kv"].dtype.itemsize
        if heads // packing not in (1, 2, 4) and heads % (8 * packing):
            raise UnsupportedError(
                f"{spec.num_kv_heads} KV heads in {spec.kv_dtype}",
                "a number of which keys and values fill 1, 2, 4 or 8 rows of a tile",
                "Choose another kernel.",
            )
        pages = batch.page_table
        if batch.bucket.rows_are_pages:
            pages = jnp.arange(batch.bucket.seqs, dtype=jnp.int32)[:, None]
        arguments = (
            q,
            kv.reshape(*kv.shape[:2], heads, LANES),
            batch.kv_lens,
            pages,
            batch.cu_q_lens,
            batch.distribution[-1:],
        )
        blocks = config or RaggedBlocks()
        kv_pages = min(max(1, blocks.block_kv // layout.page_size), pages.shape[1])
        out = ragged_paged_attention(
            *arguments,
            sm_scale=spec.softmax_scale,
            sliding_window=spec.window,
            soft_cap=spec.softcap,
            num_kv_pages_per_block=kv_pages,
            num_queries_per_block=blocks.block_q,
        )
        real = batch.seq_ids < batch.bucket.seqs
        return jnp.where(real[:, None, None], out, 0), cache, None


attention = RaggedPagedAttention()
