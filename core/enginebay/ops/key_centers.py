"""The centres of keys: one vector for each KV head of a layer, which is subtracted from the keys
that a quantised cache stores.

A head's keys have much in common, and what they have in common takes up the range of a token's
codes. A vector c that is subtracted from every key of a head changes all scores of a query q by the
same q . c, so attention does not change. Any c is right; the mean key leaves the least to quantise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from enginebay.contracts.cache import CacheArrays
from enginebay.ops.head_rotation import ROTATED
from enginebay.ops.spec import AttnSpec
from enginebay.weights import KEY_CENTERS

KEY_CENTER = "key_center"
"""The name of the centre, f32 [kv_heads, head_dim], among the arrays of a layer's cache that
attention is called with.
"""

CENTER_AXES = ("kv_heads", None)
"""The logical axes of a centre."""

_SHIFT_ADDS = frozenset({"slopes"})
"""Inputs of attention that add to scores. A sink is a score of its own, which does not change."""


def has_center(spec: AttnSpec) -> bool:
    """Return whether keys of a layer are stored less a centre."""
    if spec.kv_storage not in ROTATED or spec.v_is_k_prefix or spec.kv_shared:
        return False
    return spec.softcap is None and not spec.return_lse and set(spec.inputs) <= _SHIFT_ADDS


def center_path(group: str) -> str:
    """Return the path of the weight with the centres of a cache group, f32 [layers, kv_heads,
    head_dim].
    """
    return f"{KEY_CENTERS}{group}"


def with_center(
    cache: CacheArrays, weights: Mapping[str, Any], group: str, layer: int
) -> CacheArrays:
    """Return the arrays of a layer of a cache group with its centre, if the weights have one."""
    centers = weights.get(center_path(group))
    return cache if centers is None else {**cache, KEY_CENTER: centers[layer]}


def without_center(cache: CacheArrays) -> tuple[CacheArrays, dict[str, jax.Array]]:
    """Return the arrays of a layout, and the centre as a dict, which is empty without one."""
    arrays = {name: array for name, array in cache.items() if name != KEY_CENTER}
    return arrays, {name: array for name, array in cache.items() if name == KEY_CENTER}
