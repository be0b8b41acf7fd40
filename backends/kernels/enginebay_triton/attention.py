"""The op attention on NVIDIA GPUs: every mode, over paged and contiguous caches."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from enginebay.contracts.cache import CacheArrays, KVLayout
from enginebay.errors import InternalError, UnsupportedError
from enginebay.ops.caps import Caps, Env
from enginebay.ops.spec import AttnBatch, AttnSpec, Bucket
from enginebay_triton import interpreter
from enginebay_triton.attention_config import (
    SHORTEST_SPLIT,
    TritonAttentionConfig,
    attention_candidates,
    column_blocks,
    default_config,
    next_power,
)
from enginebay_triton.cache_arrays import stored_cache
from enginebay_triton.call import Launch, Launcher, graph_features, launch, require_versions

require_versions()

from enginebay_triton.attention_kernels import attention_kernel, reduce_kernel  # noqa: E402  # imports triton

DTYPES = frozenset({"bfloat16", "float16", "float32"})
STORAGES = frozenset({"int8", "uint4", "fp8"})
FEATURES = graph_features() | {
    "window",
    "softcap",
    "sinks",
    "lse",
    "kv_share",
    "mla",
    "deterministic",
    "shard_map",
}

CAPS = Caps(
    platforms=frozenset({"cuda"}),
    layouts=("nhd", "hnd"),
    q_dtypes=DTYPES,
    kv_dtypes=DTYPES | STORAGES,
    features=FEATURES,
    head_dim=lambda width: width <= 256,
    latent_dim=lambda width: width <= 576,
    group=lambda heads: heads <= 16,
    ragged_decode=True,
)
INTERPRETED_CAPS = dataclasses.replace(
    CAPS,
    platforms=frozenset({"cpu"}),
    q_dtypes=interpreter.DTYPES,
    kv_dtypes=interpreter.DTYPES | STORAGES,
)


SHARES = ("BLOCK_D", "WINDOW", "BLOCK_N", "SPLITS", "CHUNK", "SHORTEST")
"""Constants that decide which part of the context each split reads and where it writes."""


@dataclasses.dataclass(frozen=True)
class TritonAttention:
    """Attention over pages: each row reads its own pages up to its length, without a copy.

    Long contexts of small batches are split over several programs.
    """

    name: str = "triton"
    version: str = "2"
    priority: int = 10
    caps: Caps = CAPS
    launcher: Launcher = launch

    def default_config(
        self, env: Env, spec: AttnSpec, bucket: Bucket, layout: KVLayout
    ) -> TritonAttentionConfig:
        """Return block sizes for the head size and dtype, and as many splits as fill the device."""
        return default_config(env, spec, bucket, layout)

    def candidates(
        self, env: Env, spec: AttnSpec, bucket: Bucket, layout: KVLayout
    ) -> Sequence[TritonAttentionConfig]:
        """Return configurations to time, the default first; all fit the GPU's shared memory."""
        return attention_candidates(env, spec, bucket, layout)

    def interpreted(self) -> TritonAttention:
        """Return the same kernels, run by Triton's interpreter on platform "cpu"."""
        interpreter.require()
        return dataclasses.replace(self, caps=INTERPRETED_CAPS, launcher=interpreter.interpret)

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
        config: TritonAttentionConfig,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, CacheArrays, jax.Array | None]:
        """Return (out [T, Hq, Dv] in q's dtype, cache, log-sum-exp f32 [T, Hq] or None).

        AttentionImpl describes the arguments.
        """
        if k is not None or v is not None:
            raise InternalError(
                "triton attention is given keys that kv_write has put into the cache"
            )
        if spec.v_dim != spec.head_dim and not spec.v_is_k_prefix:
            given = f"v_head_dim {spec.v_head_dim}"
            allowed = f"v_head_dim {spec.head_dim}, the same as head_dim"
            raise UnsupportedError(given, allowed, "Choose another kernel.")
        stored = stored_cache(cache, layout)
        constants = {
            **_problem(spec, batch.bucket),
            **_blocks(spec, batch.bucket, config),
            **stored.constants,
        }
        nothing = batch.kv_lens  # the kernel needs an address, and does not read it
        arrays = [q, *stored.values, batch.page_table, batch.kv_lens, batch.cu_q_lens]
        arrays.append(nothing if sinks is None else sinks.astype(jnp.float32))
        arrays += [nothing if each is None else each for each in (*stored.scales, *stored.zeros)]
        out, lse = self._run(arrays, constants, batch.bucket, config, spec)
        return out, cache, lse if spec.return_lse else None

    def _run(
        self,
        arrays: list[jax.Array],
        constants: dict[str, Any],
        bucket: Bucket,
        config: TritonAttentionConfig,
        spec: AttnSpec,
    ) -> tuple[jax.Array, jax.Array]:
        q, heads, splits = arrays[0], spec.num_q_heads, config.splits
        decode = bucket.mode == "decode"
        blocks = bucket.seqs if decode else bucket.tokens // constants["BLOCK_Q"] + bucket.seqs + 1
        grid = (blocks, spec.num_kv_heads, splits)
        f32 = jnp.float32
        results = jax.ShapeDtypeStruct((*q.shape[:2], spec.v_dim), q.dtype)
        made: tuple[jax.ShapeDtypeStruct, ...]
        if splits == 1:
            made = (
                results,
                jax.ShapeDtypeStruct((1,), f32),
                jax.ShapeDtypeStruct(q.shape[:2], f32),
            )
        else:
            parts = (bucket.seqs, splits, heads)
            made = (
                jax.ShapeDtypeStruct((*parts, constants["BLOCK_D"]), f32),
                jax.ShapeDtypeStruct(parts, f32),
                jax.ShapeDtypeStruct(parts, f32),
            )
        how = Launch(
            grid, made, constants, num_warps=config.num_warps, num_stages=config.num_stages
        )
        out, largest, total = self.launcher(attention_kernel, arrays, how)
        if splits == 1:
            return out, total
        reduction = Launch(
            (bucket.seqs, heads),
            (results, jax.ShapeDtypeStruct(q.shape[:2], f32)),
            {
                "NUM_Q_HEADS": heads,
                "V_DIM": spec.v_dim,
                **{name: constants[name] for name in SHARES},
                # The size of a block decides the order of its sums. Deterministic mode uses one
                # size for every bucket.
                "BLOCK_S": 16 if config.chunk else min(16, next_power(splits)),
                "ALL_SPLITS": next_power(splits),
            },
        )
        combined, lse = self.launcher(reduce_kernel, [out, largest, total, arrays[4]], reduction)
        return combined, lse


def _problem(spec: AttnSpec, bucket: Bucket) -> dict[str, Any]:
    return {
        "SCALE": float(spec.softmax_scale),
        "SOFTCAP": float(spec.softcap or 0.0),
        "WINDOW": spec.window or 0,
        "CAUSAL": spec.causal,
        "HAS_SINKS": "sinks" in spec.inputs,
        "IS_DECODE": bucket.mode == "decode",
        "NUM_TOKENS": bucket.tokens,
        "NUM_ROWS": bucket.seqs,
        "PAGES_PER_ROW": bucket.pages_per_seq,
        "NUM_KV_HEADS": spec.num_kv_heads,
        "GROUP": spec.group,
        "HEAD_DIM": spec.head_dim,
        "V_DIM": spec.v_dim,
        "V_IS_K_PREFIX": spec.v_is_k_prefix,
    }


def _blocks(spec: AttnSpec, bucket: Bucket, config: TritonAttentionConfig) -> dict[str, int]:
    decode = bucket.mode == "decode"
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_Q": 1 if decode else config.block_m // spec.group,
        "BLOCK_N": config.block_n,
        **dict(zip(("BLOCK_D", "BLOCK_REST"), column_blocks(spec), strict=True)),
        "SPLITS": config.splits,
        "CHUNK": config.chunk,
        "SHORTEST": max(SHORTEST_SPLIT, config.block_n),
        "STEPS": bucket.seqs.bit_length(),
    }


attention = TritonAttention()
