"""Attention "triton_flash": first chunks of prompts, from the new keys and values alone, in
Triton.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from enginebay.contracts.cache import CacheArrays, KVLayout
from enginebay.errors import InternalError, UnsupportedError
from enginebay.ops.caps import Caps, Env
from enginebay.ops.spec import AttnBatch, AttnSpec, Bucket
from enginebay_triton.call import Launch, Launcher, graph_features, launch, require_versions
from enginebay_triton.interpreter import interpret, require
from enginebay_triton.targets import shared_bytes_per_block

require_versions()

from enginebay_triton.flash_kernels import flash_prefill_kernel  # noqa: E402  # needs Triton
from enginebay_triton.write import LAYOUTS, KvWrite  # noqa: E402

CAPS = Caps(
    platforms=frozenset({"cuda"}),
    layouts=LAYOUTS,
    modes=frozenset({"prefill"}),
    features=graph_features()
    | {"window", "softcap", "sinks", "lse", "deterministic", "fused_write", "shard_map"},
    head_dim=lambda dim: dim in (16, 32, 64, 128, 256),
)


@dataclasses.dataclass(frozen=True)
class TritonFlashConfig:
    """Query tokens per program, keys per tile, warps, and pipeline stages."""

    block_m: int = 128
    block_n: int = 64
    num_warps: int = 8
    num_stages: int = 3

    def shared_bytes(self, head_dim: int, value_bytes: int) -> int:
        """Estimate the shared memory: queries, and the keys and values of every stage."""
        return (self.block_m + 2 * self.num_stages * self.block_n) * head_dim * value_bytes


NARROW_DEFAULTS = {
    16: TritonFlashConfig(128, 64, 4, 3),
    32: TritonFlashConfig(128, 64, 4, 3),
    64: TritonFlashConfig(128, 64, 8, 3),
    128: TritonFlashConfig(128, 64, 8, 3),
    256: TritonFlashConfig(64, 32, 8, 2),
}
"""Configurations by head_dim for dtypes of two bytes. They fit the registers, and the shared memory
from sm_80 on.
"""

BEFORE_HOPPER = ("sm_80", "sm_86", "sm_87", "sm_89")

WIDE_DEFAULTS = {
    dim: TritonFlashConfig(16, 32 if dim == 128 else 16, 8, 1) for dim in (16, 32, 64, 128, 256)
}
"""Configurations for float32. Its exact products use many registers and no tensor cores."""


@dataclasses.dataclass(frozen=True)
class FlashPrefill:
    """Attention of rows without a prefix: reads q, k and v once, and only writes the cache.

    The configuration does not depend on the bucket. So a row's result depends only on its own
    tokens.
    """

    name: str = "triton_flash"
    version: str = "1"
    priority: int = 12
    caps: Caps = CAPS
    launcher: Launcher = launch

    def default_config(
        self, env: Env, spec: AttnSpec, bucket: Bucket, layout: KVLayout
    ) -> TritonFlashConfig:
        """Return the configuration for the head_dim, the dtype and the architecture."""
        if jnp.dtype(spec.q_dtype).itemsize > 2:
            return WIDE_DEFAULTS[spec.head_dim]
        config = NARROW_DEFAULTS[spec.head_dim]
        # Before Hopper, products keep their operands in registers. Fewer keys per tile avoid
        # spills.
        return dataclasses.replace(config, block_n=32) if env.arch in BEFORE_HOPPER else config

    def candidates(
        self, env: Env, spec: AttnSpec, bucket: Bucket, layout: KVLayout
    ) -> Sequence[TritonFlashConfig]:
        """Return the configurations that fit the shared memory and the registers of a warp."""
        value_bytes, dim = jnp.dtype(spec.q_dtype).itemsize, spec.head_dim
        limit = shared_bytes_per_block(env.arch)
        found = [
            TritonFlashConfig(block_m, block_n, warps, stages)
            for block_m in (16, 32, 64, 128)
            for block_n in (16, 32, 64, 128)
            for warps in (4, 8)
            for stages in (1, 2, 3, 4)
        ]
        return [
            config
            for config in found
            if config.shared_bytes(dim, value_bytes) <= limit
            and config.block_m * max(dim, config.block_n) <= config.num_warps * 32 * 96
        ]

    def interpreted(self) -> FlashPrefill:
        """Return the same kernel in Triton's interpreter, for platform "cpu".

        Raises UnsupportedError without Triton.
        """
        require()
        caps = dataclasses.replace(
            self.caps,
            platforms=frozenset({"cpu"}),
            q_dtypes=frozenset({"float32", "float16"}),
            kv_dtypes=frozenset({"float32", "float16"}),
        )
        return dataclasses.replace(self, launcher=interpret, caps=caps)

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
        config: TritonFlashConfig,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, CacheArrays, jax.Array | None]:
        """Return (out [T, Hq, D] in q's dtype, cache, log-sum-exp f32 [T, Hq] or None).

        AttentionImpl describes the arguments.
        """
        if spec.v_head_dim not in (None, spec.head_dim):
            given = f"v_head_dim {spec.v_head_dim}"
            allowed = f"v_head_dim {spec.head_dim}, the same as head_dim"
            raise UnsupportedError(given, allowed, "Choose another kernel.")
        if k is None or v is None:
            raise InternalError(f"{self.name} reads new keys and values, and received none")
        cache = KvWrite(self.launcher)(cache, batch.slots, k, v, layout=layout)
        # Keys and values are rounded to the dtype of the cache, as later steps will read them.
        k, v = (x.astype(layout.dtype).astype(q.dtype) for x in (k, v))
        blocks = _blocks(batch, config.block_m)
        given_sinks = jnp.zeros((1,), jnp.float32) if sinks is None else sinks.astype(jnp.float32)
        tokens, heads, dim = q.shape
        lse_shape = (tokens, heads) if spec.return_lse else (1,)
        how = Launch(
            (heads, blocks[1].shape[0]),
            (jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(lse_shape, jnp.float32)),
            {
                "NUM_ROWS": batch.kv_lens.shape[0],
                "NUM_Q_HEADS": heads,
                "NUM_KV_HEADS": k.shape[1],
                "HEAD_DIM": dim,
                "SCALE": float(spec.softmax_scale),
                "CAP": float(spec.softcap or 0.0),
                "CAUSAL": spec.causal,
                "WINDOW": spec.window or 0,
                "HAS_SINKS": sinks is not None,
                "RETURN_LSE": spec.return_lse,
                "BLOCK_M": config.block_m,
                "BLOCK_N": config.block_n,
            },
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
        out, lse = self.launcher(flash_prefill_kernel, [q, k, v, *blocks, given_sinks], how)
        return out, cache, lse if spec.return_lse else None


def _blocks(batch: AttnBatch, block_m: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (starts [S + 2], row of each block, first token of each block); row S is padding.

    All layers share the result. The number of blocks is enough for any lengths of the bucket's
    rows, because each row has at most one partial block.
    """
    num_rows, num_tokens = batch.kv_lens.shape[0], batch.positions.shape[0]
    starts = jnp.concatenate([batch.cu_q_lens, jnp.full(1, num_tokens, jnp.int32)])
    needed = (starts[1:] - starts[:-1] + block_m - 1) // block_m
    ends = jnp.cumsum(needed, dtype=jnp.int32)
    block = jnp.arange(-(-num_tokens // block_m) + num_rows + 1, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(ends, block, side="right").astype(jnp.int32), num_rows)
    return starts, row, (block - (ends - needed)[row]) * block_m


triton_flash = FlashPrefill()
