"""Builds weights from checkpoint tensors, part by part, so that a shard reads only its own part."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from enginebay.contracts.model import TensorSource

Index = tuple[slice, ...]

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""Names of the checkpoint tensors of the embedding and of an untied head."""


def whole(name: str, shape: tuple[int, ...]) -> TensorSource:
    """Return the source of a weight that equals one checkpoint tensor."""
    return TensorSource((name,), (shape,), lambda readers, index: readers[0][index])


def transposed(name: str, shape: tuple[int, int]) -> TensorSource:
    """Return the source of a weight [outputs, inputs] whose tensor is [inputs, outputs]."""
    rows, columns = shape
    return TensorSource(
        (name,), ((columns, rows),), lambda readers, index: readers[0][index[::-1]].T
    )


def split_columns(name: str, shape: tuple[int, int, int, int]) -> TensorSource:
    """Read a tensor [out, query heads * head_dim] as [out, kv_heads, group, head_dim]."""
    num_out, num_kv_heads, group, head_dim = shape

    def build(readers: Sequence[np.ndarray], index: Index) -> np.ndarray:
        first, last, _ = index[1].indices(num_kv_heads)
        width = group * head_dim
        part = readers[0][index[0], first * width : last * width]
        return part.reshape(part.shape[0], last - first, group, head_dim)

    return TensorSource((name,), ((num_out, num_kv_heads * group * head_dim),), build)


def fused_qkv(
    names: tuple[str, str, str],
    shape: tuple[int, ...],
    *,
    repeats: int,
    features: tuple[int, ...] = (),
) -> TensorSource:
    """Join q, k and v tensors [heads * head_dim, *features] into one weight.

    The weight is [kv_heads, group + 2, head_dim, *features]; `shape` is (kv_heads, group,
    head_dim). Each KV head of the checkpoint is repeated `repeats` times, and its query heads are
    divided among the copies. The second axis has the query heads of a copy, then its key, then its
    value.
    """
    num_kv_heads, group, head_dim = shape

    def rows(reader: np.ndarray, first: int, last: int) -> np.ndarray:
        part = reader[first * head_dim : last * head_dim]
        return part.reshape(last - first, head_dim, *features)

    def kv(reader: np.ndarray, first: int, last: int) -> np.ndarray:
        low, high = first // repeats, -(-last // repeats)
        heads = (
            np.repeat(rows(reader, low, high), repeats, axis=0)
            if repeats > 1
            else rows(reader, low, high)
        )
        return heads[first - low * repeats : last - low * repeats, None]

    def build(readers: Sequence[np.ndarray], index: Index) -> np.ndarray:
        first, last, _ = index[0].indices(num_kv_heads)
        q = rows(readers[0], first * group, last * group).reshape(
            last - first, group, head_dim, *features
        )
        return np.concatenate([q, kv(readers[1], first, last), kv(readers[2], first, last)], axis=1)

    q_shape = (num_kv_heads * group * head_dim, *features)
    kv_shape = (num_kv_heads // repeats * head_dim, *features)
    return TensorSource(names, (q_shape, kv_shape, kv_shape), build)
