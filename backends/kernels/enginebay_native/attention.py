"""The op attention for decode steps: each row reads its own pages, up to its length."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.contracts.cache import CacheArrays, KVLayout
from enginebay.errors import InternalError, UnsupportedError
from enginebay.ops.caps import Caps, Env
from enginebay.ops.kv_storage import KV_STORAGES
from enginebay.ops.spec import AttnBatch, AttnSpec, Bucket
from enginebay_native.calls import register
from enginebay_native.compiling import begin_compiling, check_library

FORMS = {"float32": "f32", "bfloat16": "bf16"}
"""dtypes of keys and values, each with the end of the name of its library."""

CODES = "codes"
"""The end of the name of the library for quantised caches."""

check_library("attention_f32")

DTYPES = frozenset({"float32", "bfloat16"})

CAPS = Caps(
    platforms=frozenset({"cpu"}),
    layouts=("hnd",),
    modes=frozenset({"decode"}),
    q_dtypes=DTYPES,
    kv_dtypes=DTYPES | KV_STORAGES,
    features=frozenset(
        {"window", "softcap", "sinks", "lse", "kv_share", "mla", "deterministic", "shard_map"}
    ),
    ragged_decode=True,
)


@dataclasses.dataclass(frozen=True)
class NativeAttention:
    """Decode attention: scores of a row's keys, softmax, and the weighted sum of its values.

    Nothing after the row's length is read. Keys and values of a quantised cache are converted a few
    at a time. A latent cache is read in blocks of keys, whose first columns are the values.
    """

    name: str = "native"
    version: str = "3"
    priority: int = 10
    caps: Caps = CAPS

    def prepare(self, needs: Mapping[str, Collection[str]]) -> None:
        """Begin to compile the C++ of decode steps."""
        forms = dict.fromkeys(FORMS.get(name, CODES) for name in needs.get("kv_dtypes", ()))
        begin_compiling(*(f"attention_{form}" for form in forms))

    def default_config(self, env: Env, spec: AttnSpec, bucket: Bucket, layout: KVLayout) -> None:
        """Return None: there is nothing to tune."""
        return

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
        """Return (out [T, Hq, Dv] in q's dtype, cache, log-sum-exp f32 [T, Hq] or None).

        AttentionImpl describes the arguments.
        """
        if k is not None or v is not None or batch.bucket.mode != "decode":
            raise InternalError(
                "native attention decodes, and is given keys that kv_write has put into the cache"
            )
        if spec.v_dim != spec.head_dim and not spec.v_is_k_prefix:
            given = f"v_head_dim {spec.v_head_dim}"
            allowed = f"v_head_dim {spec.head_dim}, the same as head_dim"
            raise UnsupportedError(given, allowed, "Choose another kernel.")
        shapes = (
            jax.ShapeDtypeStruct((*q.shape[:2], spec.v_dim), q.dtype),
            jax.ShapeDtypeStruct(q.shape[:2], jnp.float32),
        )
        none = jnp.zeros(0, jnp.float32)
        form = FORMS.get(str(cache["k"].dtype), CODES)
        out, lse = jax.ffi.ffi_call(register(f"attention_{form}"), shapes)(
            q,
            cache["k"],
            cache["k" if spec.v_is_k_prefix else "v"],
            *self._scales(cache),
            batch.page_table,
            batch.kv_lens,
            none if sinks is None else sinks.astype(jnp.float32),
            scale=np.float32(spec.softmax_scale),
            softcap=np.float32(spec.softcap or 0.0),
            window=np.int64(spec.window or 0),
            v_prefix=np.bool_(spec.v_is_k_prefix),
        )
        return out, cache, lse if spec.return_lse else None

    @staticmethod
    def _scales(cache: CacheArrays) -> list[jax.Array]:
        """Return the scales and zero points of keys and values. An array that the cache does not
        have is empty, such as the zero points of an int8 cache.
        """
        none = {"scales": jnp.zeros(0, jnp.bfloat16), "zeros": jnp.zeros(0, jnp.int16)}
        return [cache.get(f"{n}_{part}", none[part]) for part in none for n in "kv"]


attention = NativeAttention()
