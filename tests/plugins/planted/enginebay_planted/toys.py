"""Attention for a device that is nowhere, by way of plain JAX: it can be interpreted and compiled,
and never run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from enginebay.contracts.cache import CacheArrays, KVLayout
from enginebay.ops.caps import Caps, Env
from enginebay.ops.spec import AttnBatch, AttnSpec, Bucket
from enginebay_planted import norms
from enginebay_xla.attention import xla_attention

CAPS = Caps(
    platforms=frozenset({"npu"}),
    layouts=("nhd",),
    modes=frozenset({"decode"}),
    q_dtypes=frozenset({"float32", "bfloat16"}),
    kv_dtypes=frozenset({"float32", "bfloat16"}),
    features=frozenset({"window", "fused_write"}),
    head_dim=lambda d: d in (32, 64, 128),
    page_size=lambda p: p >= 32,
)

INTERPRETED = dataclasses.replace(
    CAPS,
    platforms=frozenset({"cpu"}),
    q_dtypes=frozenset({"float32"}),
    kv_dtypes=frozenset({"float32"}),
    features=frozenset({"fused_write"}),
)
"""A few of the cases: enough to tell a right kernel from a wrong one."""


@dataclasses.dataclass(frozen=True)
class Toy:
    """Attention by `xla`, with a factor on its outputs, and perhaps a cache that grows."""

    name: str
    factor: float = 1.0
    grows: bool = False
    version: str = "1"
    priority: int = 0
    caps: Caps = CAPS

    def default_config(self, env: Env, spec: AttnSpec, bucket: Bucket, layout: KVLayout) -> None:
        return None

    def interpreted(self) -> Toy:
        return dataclasses.replace(self, caps=INTERPRETED)

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
        config: Any,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, CacheArrays, jax.Array | None]:
        assert k is not None, "it writes the cache itself"
        assert v is not None, "it writes the cache itself"
        cache = layout.write(cache, batch.slots, k, v)
        out, cache, lse = xla_attention(
            q, None, None, cache, batch, spec=spec, layout=layout, config=config, sinks=sinks
        )
        if self.grows:
            cache = {name: jnp.concatenate([x, x[:1]]) for name, x in cache.items()}
        return (out * self.factor).astype(out.dtype), cache, lse


@dataclasses.dataclass(frozen=True)
class ToyNorm:
    """A norm with an interpreted form."""

    def interpreted(self) -> Callable[..., jax.Array]:
        return norms.right

    def __call__(self, x: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
        return norms.right(x, weight, eps=eps)


toy = Toy("toy")
toy_wrong = Toy("toy_wrong", factor=1.001)
toy_copies = Toy("toy_copies", grows=True)
toy_norm = ToyNorm()
