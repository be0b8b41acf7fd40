"""Queries and keys whose scores are in a given range: plain, about +200 or -200, or one outlier."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from enginebay.ops.spec import AttnSpec

LARGE_SCORE = 200.0
"""Score of outliers, and about the score of all keys for "high" or (negative) "low"."""


def directions(spec: AttnSpec, scores: str, rng: np.random.Generator) -> np.ndarray:
    """Return f64 [Hkv, D], one vector per KV head. A query and a key that both contain it have the
    score LARGE_SCORE. For plain scores it is zero.
    """
    if scores == "plain":
        return np.zeros((spec.num_kv_heads, spec.head_dim))
    unit = rng.normal(size=(spec.num_kv_heads, spec.head_dim))
    unit /= np.linalg.norm(unit, axis=-1, keepdims=True)
    return unit * np.sqrt(LARGE_SCORE / spec.softmax_scale)


def random_keys(
    spec: AttnSpec,
    scores: str,
    kv_lens: Sequence[int],
    rng: np.random.Generator,
    toward: np.ndarray,
) -> tuple[np.ndarray, ...]:
    """Return the keys [kv_len, Hkv, D] of each row, moved in the direction `toward`. With scores
    "outlier", only one key of each head is moved; its position differs between rows and heads.
    """
    keys = []
    for row, total in enumerate(kv_lens):
        own = rng.normal(size=(total, *toward.shape))
        if scores == "outlier":
            for head in range(toward.shape[0] if total else 0):
                own[_outlier(row + 2 * head, total), head] += toward[head]
        else:
            own += toward
        keys.append(own.astype(jnp.dtype(spec.kv_dtype)))
    return tuple(keys)


def _outlier(number: int, total: int) -> int:
    """Return the position of an outlier: the last key, the first key, or a key between, in turn."""
    return (total - 1, 0, total // 2, total // 3, max(total - 2, 0))[number % 5]
