"""Attention "cudnn": first chunks of prompts by NVIDIA's library, through
jax.nn.dot_product_attention.

The library needs rows of one length. So packed rows are copied into padded rows, a few at a time.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from enginebay.contracts.cache import CacheArrays, KVLayout
from enginebay.errors import InternalError, UnsupportedError
from enginebay.ops.caps import Caps, Env
from enginebay.ops.spec import AttnBatch, AttnSpec, Bucket

PADDING = 4
"""Padded rows of one library call have at most this many times the tokens of the step."""

ROW_MULTIPLE = 64
"""Padded lengths are multiples of this number, the size of the library's tiles."""


def _has_flash(arch: str) -> bool:
    """Return whether an architecture is Ampere or later, or is unknown."""
    number = arch.removeprefix("sm_")
    return not number.isdigit() or int(number) >= 80


CAPS = Caps(
    platforms=frozenset({"cuda"}),
    layouts=("nhd", "hnd", "tpu_rpa"),
    modes=frozenset({"prefill"}),
    q_dtypes=frozenset({"bfloat16", "float16"}),
    kv_dtypes=frozenset({"bfloat16", "float16"}),
    features=frozenset({"window", "fused_write", "shard_map"}),
    arch=_has_flash,
    head_dim=lambda dim: dim <= 128 and dim % 8 == 0,
)


@dataclasses.dataclass(frozen=True)
class CudnnPrefill:
    """Attention of rows without a prefix by cuDNN's fused kernel.

    `implementation` is the argument of that name of jax.nn.dot_product_attention.
    """

    name: str = "cudnn"
    version: str = "1"
    priority: int = 5
    caps: Caps = CAPS
    implementation: Literal["cudnn", "xla"] = "cudnn"

    def default_config(self, env: Env, spec: AttnSpec, bucket: Bucket, layout: KVLayout) -> None:
        """Return None: the library chooses its own block sizes, so there is nothing to tune."""
        return

    def interpreted(self) -> CudnnPrefill:
        """Return the same rows, padding and masks with jax.nn's own attention on platform "cpu".

        CPUs have no f16 products.
        """
        kinds = frozenset({"bfloat16", "float32"})
        caps = dataclasses.replace(
            self.caps, platforms=frozenset({"cpu"}), q_dtypes=kinds, kv_dtypes=kinds
        )
        return dataclasses.replace(self, implementation="xla", caps=caps)

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
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, CacheArrays, jax.Array | None]:
        """Return (out [T, Hq, D] in q's dtype, cache, None); see AttentionImpl."""
        if sinks is not None or (spec.window is not None and not spec.causal):
            given = "scaled cache values, sinks, or a window that is not causal"
            raise UnsupportedError(given, "none of these", "Choose another kernel.")
        if k is None or v is None:
            raise InternalError(f"{self.name} reads new keys and values, and received none")
        cache = layout.write(cache, batch.slots, k, v)
        # Keys and values are rounded to the dtype of the cache, as later steps will read them.
        k, v = (x.astype(layout.dtype).astype(q.dtype) for x in (k, v))
        num_rows, num_tokens = batch.kv_lens.shape[0], q.shape[0]
        length = -(-batch.bucket.max_q_len // ROW_MULTIPLE) * ROW_MULTIPLE
        at_once = min(num_rows, max(1, PADDING * num_tokens // length))
        num_groups = -(-num_rows // at_once)
        extra = num_groups * at_once - num_rows
        starts = jnp.pad(batch.cu_q_lens[:-1], (0, extra))
        lengths = jnp.pad(batch.q_lens, (0, extra))

        def attend(group: jax.Array | int, out: jax.Array) -> jax.Array:
            """Return `out` with the results of the rows of one group written into it."""
            start, num = (
                lax.dynamic_slice(x, (group * at_once,), (at_once,)) for x in (starts, lengths)
            )
            offset = jnp.arange(length, dtype=jnp.int32)
            is_token = offset < num[:, None]
            tokens = jnp.where(is_token, start[:, None] + offset, num_tokens)
            queries, keys, values = (x.at[tokens].get(mode="fill", fill_value=0) for x in (q, k, v))
            attended = self._attend_rows(queries, keys, values, jnp.maximum(num, 1), spec)
            return out.at[tokens].set(attended.astype(q.dtype), mode="drop")

        out = jnp.zeros_like(q)
        out = attend(0, out) if num_groups == 1 else lax.fori_loop(0, num_groups, attend, out)
        return out, cache, None

    def _attend_rows(
        self, q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array, spec: AttnSpec
    ) -> jax.Array:
        """Attend padded rows [rows, length, heads, D]; row r has lengths[r] valid tokens."""
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            scale=spec.softmax_scale,
            is_causal=spec.causal,
            query_seq_lengths=lengths,
            key_value_seq_lengths=lengths,
            local_window_size=None if spec.window is None else (spec.window - 1, 0),
            implementation=self.implementation,
        )


cudnn = CudnnPrefill()
