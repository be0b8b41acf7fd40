"""Queries and keys whose scores lie in a wanted range: plain, about +200 or -200, or one outlier
key.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from enginebay.ops.spec import AttnSpec

LARGE_SCORE = 200.0
"""Score of outliers, and about that of all keys where `scores` is "high" or, below 0, "low"."""


def directions(spec: AttnSpec, scores: str, rng: np.random.Generator) -> np.ndarray:
    """f64 [Hkv, D]: what queries and keys have in common so that their score is LARGE_SCORE; 0
    where scores are plain.
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
    """[kv_len, Hkv, D] of each row: an outlier is one key of a head, elsewhere in each row and
    head.
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
    """The last key, the first one, and some between, in turn."""
    return (total - 1, 0, total // 2, total // 3, max(total - 2, 0))[number % 5]
