"""Builds weights from checkpoint tensors, part by part, so that a shard reads only its own part."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

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


def taps(name: str, shape: tuple[int, int]) -> TensorSource:
    """Read a tensor [channels, 1, taps] of a convolution as a weight [channels, taps]."""

    def build(readers: Sequence[np.ndarray], index: Index) -> np.ndarray:
        return readers[0][(index[0], slice(None), index[1])][:, 0]

    return TensorSource((name,), ((shape[0], 1, shape[1]),), build)


NUM_BLOCKS = 4
"""Parts of the heads in a tensor of QkvRows "blocks"."""


@dataclasses.dataclass(frozen=True)
class QkvRows:
    """How the rows of queries, keys and values lie in a checkpoint.

    `place`: "apart" in three tensors; "stacked" in one, all queries, all keys, then all values;
    "grouped" in one, for each KV head its queries, its key and its value; or "blocks" in one, for
    each of NUM_BLOCKS equal parts of the heads its queries, its values, then its keys, as many.
    `interleaved`: the two features of a rotary pair lie beside each other in the first
    `interleaved` features of a head.
    """

    place: Literal["apart", "stacked", "grouped", "blocks"] = "apart"
    interleaved: int = 0

    def order(self, head_dim: int) -> np.ndarray | None:
        """Return where each feature of a head is in the checkpoint, int [head_dim]; None: there."""
        if not self.interleaved:
            return None
        pairs = np.arange(self.interleaved).reshape(-1, 2).T.ravel()
        return np.concatenate([pairs, np.arange(self.interleaved, head_dim)])


APART = QkvRows()


def two_parts(name: str, shape: tuple[int, int, int]) -> TensorSource:
    """Read a tensor [2 * rows, inputs] as a weight [2, rows, inputs]."""
    _, rows, inputs = shape

    def build(readers: Sequence[np.ndarray], index: Index) -> np.ndarray:
        first, last, _ = index[1].indices(rows)
        parts = [readers[0][part * rows + first : part * rows + last] for part in range(2)]
        return np.stack(parts[index[0]])[:, :, index[2]]

    return TensorSource((name,), ((2 * rows, inputs),), build)


def heads_of_vector(name: str, shape: tuple[int, int, int], repeats: int) -> TensorSource:
    """Read a tensor [all features] as [kv_heads, group, head_dim]; each KV head of the checkpoint
    is repeated `repeats` times.
    """

    def build(readers: Sequence[np.ndarray], index: Index) -> np.ndarray:
        whole = readers[0][:].reshape(shape[0] // repeats, *shape[1:])
        return np.repeat(whole, repeats, axis=0)[index]

    return TensorSource((name,), ((shape[0] // repeats * shape[1] * shape[2],),), build)


def fused_qkv(
    names: tuple[str, ...],
    shape: tuple[int, ...],
    *,
    repeats: int,
    features: tuple[int, ...] = (),
    qkv_rows: QkvRows = APART,
) -> TensorSource:
    """Join q, k and v tensors [heads * head_dim, *features] into one weight.

    `names` are those of the three tensors, or of the one that has all rows.

    The weight is [kv_heads, group + 2, head_dim, *features]; `shape` is (kv_heads, group,
    head_dim). Each KV head of the checkpoint is repeated `repeats` times, and its query heads are
    divided among the copies. The second axis has the query heads of a copy, then its key, then its
    value.
    """
    num_kv_heads, group, head_dim = shape
    order = qkv_rows.order(head_dim)
    q_heads, kv_heads = num_kv_heads * group, num_kv_heads // repeats

    def rows(reader: np.ndarray, first: int, last: int) -> np.ndarray:
        part = reader[first * head_dim : last * head_dim]
        return part.reshape(last - first, head_dim, *features)

    def turned(heads: np.ndarray) -> np.ndarray:
        axis = heads.ndim - 1 - len(features)
        return heads if order is None else np.take(heads, order, axis)

    def kv(reader: np.ndarray, first: int, last: int, start: int) -> np.ndarray:
        low, high = first // repeats, -(-last // repeats)
        found = rows(reader, start + low, start + high)
        heads = np.repeat(found, repeats, axis=0) if repeats > 1 else found
        return heads[first - low * repeats : last - low * repeats, None]

    def build(readers: Sequence[np.ndarray], index: Index) -> np.ndarray:
        first, last, _ = index[0].indices(num_kv_heads)
        stacked = qkv_rows.place == "stacked"
        of_k, of_v = (readers[0], readers[0]) if stacked else (readers[1], readers[2])
        k_start, v_start = (q_heads, q_heads + kv_heads) if stacked else (0, 0)
        q = turned(rows(readers[0], first * group, last * group))
        q = q.reshape(last - first, group, head_dim, *features)
        k = turned(kv(of_k, first, last, k_start))
        return np.concatenate([q, k, kv(of_v, first, last, v_start)], axis=1)

    def regrouped(readers: Sequence[np.ndarray], index: Index) -> np.ndarray:
        """Each KV head of the checkpoint has `repeats` times as many queries as a copy of it."""
        first, last, _ = index[0].indices(num_kv_heads)
        low, high, size = first // repeats, -(-last // repeats), repeats * group + 2
        whole = rows(readers[0], low * size, high * size)
        whole = whole.reshape(high - low, size, head_dim, *features)
        q = whole[:, :-2].reshape(-1, group, head_dim, *features)
        kv = np.repeat(whole[:, -2:], repeats, axis=0)
        return np.concatenate([q, kv], axis=1)[first - low * repeats : last - low * repeats]

    def from_blocks(readers: Sequence[np.ndarray], index: Index) -> np.ndarray:
        """Without groups, as each head has its own key and value."""
        first, last, _ = index[0].indices(num_kv_heads)
        size = num_kv_heads // NUM_BLOCKS
        q, v, k = (
            np.stack([rows(readers[0], place, place + 1) for place in places])
            for places in (
                [(head // size * 3 + part) * size + head % size for head in range(first, last)]
                for part in range(3)
            )
        )
        return np.concatenate([turned(q), turned(k), v], axis=1)

    q_shape, kv_shape = ((heads * head_dim, *features) for heads in (q_heads, kv_heads))
    if qkv_rows.place == "apart":
        return TensorSource(names, (q_shape, kv_shape, kv_shape), build)
    assert order is None or qkv_rows.place != "grouped", (
        "no family has grouped rows in another order"
    )
    num_rows = (q_heads + 2 * kv_heads) * head_dim
    make = {"stacked": build, "grouped": regrouped, "blocks": from_blocks}[qkv_rows.place]
    return TensorSource(names, ((num_rows, *features),), make)
