"""The op attention in plain JAX. It runs everywhere, and faster implementations are compared with
it.
"""

from __future__ import annotations

import dataclasses

import jax

from enginebay.contracts.cache import CacheArrays, KVLayout
from enginebay.errors import UnsupportedError, explain
from enginebay.ops.caps import Caps, Env
from enginebay.ops.kv_storage import KV_STORAGES
from enginebay.ops.spec import AttnBatch, AttnSpec, Bucket
from enginebay_xla.attention_blocks import (
    AttentionBlocks,
    attend_blocks,
    block_candidates,
    default_blocks,
)
from enginebay_xla.attention_decode import attend_one_token_rows, fits_whole
from enginebay_xla.kv_write import kv_write

CAPS = Caps(
    layouts=("hnd", "nhd", "tpu_rpa"),
    kv_dtypes=frozenset({"bfloat16", "float16", "float32"}) | KV_STORAGES,
    features=frozenset(
        {
            "window",
            "softcap",
            "sinks",
            "alibi",
            "lse",
            "kv_share",
            "deterministic",
            "shard_map",
            "fused_write",
            "mixed_dtypes",
            "mla",
        }
    ),
    compact_decode=True,
)


@dataclasses.dataclass(frozen=True)
class XlaAttention:
    """Attention by matrix products and an online softmax, for every platform and built-in layout.

    A decode step is two batched products where the cache has the right form. Other steps run over
    blocks of at most a few hundred tokens of one row, so that working memory does not grow with
    tokens * context.
    """

    name: str = "xla"
    version: str = "1"
    priority: int = 0
    caps: Caps = CAPS

    def default_config(
        self, env: Env, spec: AttnSpec, bucket: Bucket, layout: KVLayout
    ) -> AttentionBlocks:
        """Return blocks that suit CPUs. Decode steps that read whole rows ignore them."""
        return default_blocks(bucket)

    def candidates(
        self, env: Env, spec: AttnSpec, bucket: Bucket, layout: KVLayout
    ) -> list[AttentionBlocks]:
        """Return sizes of blocks to time; none for decode steps that read whole rows."""
        return [] if fits_whole(bucket, layout) else block_candidates(bucket)

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
        config: AttentionBlocks | None = None,
        **inputs: jax.Array | None,
    ) -> tuple[jax.Array, CacheArrays, jax.Array | None]:
        """Return (out [T, Hq, Dv] in q's dtype, cache, log-sum-exp f32 [T, Hq] or None).

        AttentionImpl describes the arguments; `inputs` are those of HEAD_INPUTS that `caps` names,
        and None stands for one that is not given.
        """
        given_inputs = {name: x for name, x in inputs.items() if x is not None}
        if spec.v_dim != spec.head_dim and not spec.v_is_k_prefix:
            given = f"v_head_dim {spec.v_head_dim}"
            allowed = f"v_head_dim {spec.head_dim}, the same as head_dim"
            raise UnsupportedError(explain(given, allowed, "Choose another kernel."))
        if k is not None and v is not None:
            cache = kv_write(cache, batch.slots, k, v, layout)
        if fits_whole(batch.bucket, layout):
            out, lse = attend_one_token_rows(
                *(q, cache, batch), spec=spec, layout=layout, inputs=given_inputs
            )
        else:
            out, lse = attend_blocks(
                *(q, k, v, cache, batch),
                spec=spec,
                layout=layout,
                inputs=given_inputs,
                blocks=config,
            )
        return out, cache, lse if spec.return_lse else None


xla_attention = XlaAttention()
