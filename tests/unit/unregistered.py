"""Implementations that nobody registered, for the tests of swapping: right ones, wrong ones, and
ones that fail.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from enginebay.ops.spec import AttnBatch, AttnSpec
from enginebay_xla.attention import CAPS, xla_attention


def plain_attention(
    q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, batch: AttnBatch, spec: AttnSpec
) -> jax.Array:
    """Attention in the simple form, for causal layers without a window: softmax over all of a row's
    keys.
    """
    rows = jnp.minimum(batch.seq_ids, batch.bucket.seqs - 1)
    k, v = (
        pages[batch.page_table].reshape(batch.bucket.seqs, -1, *pages.shape[2:])[rows]
        for pages in (k_pages, v_pages)
    )
    grouped = q.reshape(q.shape[0], spec.num_kv_heads, spec.group, spec.head_dim)
    scores = jnp.einsum("thgd,tlhd->thgl", grouped, k, precision="highest") * spec.softmax_scale
    visible = jnp.arange(k.shape[1])[None] <= batch.positions[:, None]
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -1e30))
    return jnp.einsum("thgl,tlhd->thgd", weights, v, precision="highest").reshape(q.shape)


def garbage_attention(
    q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, batch: AttnBatch, spec: AttnSpec
) -> jax.Array:
    """Numbers of the right shape."""
    return jnp.sin(q * 100.0) * 7.0


def nan_attention(
    q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, batch: AttnBatch, spec: AttnSpec
) -> jax.Array:
    """Nothing but NaN."""
    return jnp.full_like(q, jnp.nan)


def failing_attention(
    q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, batch: AttnBatch, spec: AttnSpec
) -> jax.Array:
    """Cannot be traced."""
    raise RuntimeError("not written yet")


def flat_attention(
    q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, batch: AttnBatch, spec: AttnSpec
) -> jax.Array:
    """Another shape than the contract's."""
    return q.reshape(q.shape[0], -1)


def scaled_linear(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None = None, *, out_dtype: Any = None
) -> jax.Array:
    """A product that is off by a thousandth."""
    out = jnp.tensordot(
        x, weight, (tuple(range(1, x.ndim)), tuple(range(weight.ndim - x.ndim + 1, weight.ndim)))
    )
    return ((out if bias is None else out + bias) * 1.001).astype(out_dtype or x.dtype)


NUMBER = 7


paged_only = dataclasses.replace(xla_attention, caps=dataclasses.replace(CAPS, layouts=("nhd",)))
"""A whole implementation that knows one layout."""
