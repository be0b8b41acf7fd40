"""Attention by `jax.nn.dot_product_attention`, which XLA compiles for every platform."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from enginebay.contracts.cache import CacheArrays, KVLayout
from enginebay.ops.caps import Caps, Env
from enginebay.ops.spec import AttnBatch, AttnSpec, Bucket

FLOATS = frozenset({"bfloat16", "float32"})
"""In float16, JAX asks for products that XLA lacks on CPUs (ValueError: F16_F16_F32)."""

CAPS = Caps(
    platforms=frozenset({"cpu", "cuda", "tpu"}),
    layouts=("hnd", "nhd", "tpu_rpa"),
    q_dtypes=FLOATS,
    kv_dtypes=FLOATS,
    features=frozenset({"window", "lse", "kv_share", "deterministic", "fused_write"}),
)


@dataclasses.dataclass(frozen=True)
class JaxNnAttention:
    """Each row's pages are read whole, and its tokens are padded to the longest row of the step, as
    the function of JAX takes them.
    """

    name: str = "jax_nn"
    version: str = "1"
    priority: int = -20
    caps: Caps = CAPS

    def default_config(self, env: Env, spec: AttnSpec, bucket: Bucket, layout: KVLayout) -> None:
        """Return None: there is nothing to choose."""

    def candidates(self, env: Env, spec: AttnSpec, bucket: Bucket, layout: KVLayout) -> list[None]:
        """Return none."""
        return []

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
        config: None = None,
    ) -> tuple[jax.Array, CacheArrays, jax.Array | None]:
        """Return (out [T, Hq, D] in q's dtype, cache, log-sum-exp f32 [T, Hq] or None). See
        `enginebay.ops.attention`.
        """
        if k is not None and v is not None:
            cache = layout.write(cache, batch.slots, k, v)
        keys, values = (x.reshape(len(x), -1, *x.shape[-2:]) for x in _pages(layout, cache, batch))
        rows, longest = batch.bucket.seqs, batch.bucket.max_q_len
        place = jnp.arange(longest)
        token = jnp.minimum(batch.cu_q_lens[:-1, None] + place, len(q) - 1)
        is_mine = place < batch.q_lens[:, None]
        position = jnp.where(is_mine, batch.positions[token], -1)
        shown = _shown(position, batch.kv_lens, jnp.arange(keys.shape[1]), spec)
        seen = shown.any(axis=1)[..., None, None]  # what no query sees may be NaN
        out, lse = jax.nn.dot_product_attention(
            q[token],
            jnp.where(seen, keys, 0),
            jnp.where(seen, values, 0),
            mask=shown[:, None],
            scale=spec.softmax_scale,
            return_residual=True,
        )
        row = jnp.minimum(batch.seq_ids, rows - 1)
        within = jnp.clip(jnp.arange(len(q)) - batch.cu_q_lens[row], 0, longest - 1)
        sees = (batch.seq_ids < rows) & shown.any(axis=-1)[row, within]
        out = jnp.where(sees[:, None, None], out[row, within], 0).astype(q.dtype)
        return out, cache, lse[row, within].astype(jnp.float32) if spec.return_lse else None


def _pages(layout: KVLayout, cache: CacheArrays, batch: AttnBatch) -> tuple[jax.Array, jax.Array]:
    """Keys and values of the rows' pages, [S, P, page size, Hkv, D]."""
    pages = batch.page_table
    if batch.bucket.rows_are_pages:
        pages = jnp.arange(batch.bucket.seqs)[:, None]
    return layout.read(cache, pages)


def _shown(position: jax.Array, kv_lens: jax.Array, key: jax.Array, spec: AttnSpec) -> jax.Array:
    """Which keys [L] each query of each row sees, [S, Q, L]; a query at -1 sees none."""
    last = position[..., None] if spec.causal else kv_lens[:, None, None] - 1
    shown = (key <= last) & (position >= 0)[..., None]
    if spec.window is not None:
        shown &= key > position[..., None] - spec.window
    return shown


attention = JaxNnAttention()
