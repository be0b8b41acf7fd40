"""The op embedding in plain JAX: many ways to find rows of a table."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.weights import QuantizedArray, Weight
from tests.zoo.right.linears import FORMS, refuse

RowsWay = Callable[[jax.Array, jax.Array], jax.Array]
"""table [vocab, n], ids int32 [T] -> [T, n]."""


def indexed(table: jax.Array, ids: jax.Array) -> jax.Array:
    """By an index; ids are within the table."""
    return table.at[ids].get(mode="promise_in_bounds")


def one_by_one(table: jax.Array, ids: jax.Array) -> jax.Array:
    """A slice for each token."""
    return jax.lax.map(lambda i: jax.lax.dynamic_index_in_dim(table, i, keepdims=False), ids)


def last_first(table: jax.Array, ids: jax.Array) -> jax.Array:
    """The last token first, into an array that is there already."""
    count = ids.shape[0]

    def put(i: jax.Array, out: jax.Array) -> jax.Array:
        token = count - 1 - i
        return out.at[token].set(table[ids[token]])

    if not count:
        return jnp.zeros((0, table.shape[1]), table.dtype)
    return jax.lax.fori_loop(0, count, put, jnp.zeros((count, table.shape[1]), table.dtype))


def by_blocks(table: jax.Array, ids: jax.Array, *, size: int) -> jax.Array:
    """All blocks of the table in turn, of which each gives the rows that it has."""

    def take(i: jax.Array, out: jax.Array) -> jax.Array:
        first = jnp.minimum(i * size, table.shape[0] - width)
        block = jax.lax.dynamic_slice_in_dim(table, first, width)
        place = ids - first
        inside = (place >= 0) & (place < width)
        return jnp.where(inside[:, None], block[jnp.clip(place, 0, width - 1)], out)

    width = min(size, table.shape[0])
    zeros = jnp.zeros((ids.shape[0], table.shape[1]), table.dtype)
    return jax.lax.fori_loop(0, -(-table.shape[0] // size), take, zeros)


def in_order(table: jax.Array, ids: jax.Array) -> jax.Array:
    """In the order of their ids, and back."""
    order = jnp.argsort(ids)
    found = jnp.take(table, ids[order], axis=0, mode="clip", indices_are_sorted=True)
    return jnp.zeros_like(found).at[order].set(found, unique_indices=True)


def two_levels(table: jax.Array, ids: jax.Array) -> jax.Array:
    """A page of 16 rows first, then a row of it."""
    padded = jnp.pad(table, ((0, -table.shape[0] % 16), (0, 0)))
    pages = padded.reshape(-1, 16, table.shape[1])[ids // 16]
    return jnp.take_along_axis(pages, (ids % 16)[:, None, None], axis=1)[:, 0]


def by_halves(table: jax.Array, ids: jax.Array) -> jax.Array:
    """The left half of a row, then the right one, from a table that is turned around."""
    half = table.shape[1] // 2
    around = table[::-1]
    place = table.shape[0] - 1 - ids
    return jnp.concatenate([around[place, :half], around[place, half:]], axis=1)


def as_bits(table: jax.Array, ids: jax.Array) -> jax.Array:
    """The bits of the numbers are moved, as whole numbers are."""
    bits = jax.lax.bitcast_convert_type(table, jnp.dtype(f"uint{8 * table.dtype.itemsize}"))
    return jax.lax.bitcast_convert_type(bits[ids], table.dtype)


def on_host(table: jax.Array, ids: jax.Array) -> jax.Array:
    """NumPy's index."""

    def rows(table: np.ndarray, ids: np.ndarray) -> np.ndarray:
        return cast("np.ndarray", np.asarray(table)[np.asarray(ids)])

    shape = jax.ShapeDtypeStruct((ids.shape[0], table.shape[1]), table.dtype)
    found: jax.Array = jax.pure_callback(rows, shape, table, ids)
    return found


@dataclasses.dataclass(frozen=True)
class Embedding:
    """See the module. `whole`: a quantised table is dequantised before its rows are found."""

    way: RowsWay
    quantizations: tuple[str, ...] = ()
    whole: bool = False

    @property
    def capabilities(self) -> dict[str, tuple[str, ...]]:
        """What a declaration of the kernel would say."""
        return {"quantizations": self.quantizations}

    def __call__(self, table: Weight, ids: jax.Array) -> jax.Array:
        if not isinstance(table, QuantizedArray):
            return self.way(table, ids)
        refuse(table, self.quantizations, (table.activations,))
        if self.whole:
            return self.way(table.dequantized(), ids)
        rows = jax.tree.map(lambda array: self.way(array, ids), table)
        return cast("QuantizedArray", rows).dequantized()


index = Embedding(indexed, FORMS)
slices = Embedding(one_by_one, FORMS, whole=True)
backwards = Embedding(last_first, ("int8", "int8_group", "fp8"))
blocks_of_100 = Embedding(functools.partial(by_blocks, size=100))
blocks_of_4096 = Embedding(functools.partial(by_blocks, size=4096), FORMS, whole=True)
ordered = Embedding(in_order, FORMS)
levels = Embedding(two_levels, ("int8", "uint4"))
left_and_right = Embedding(by_halves)
bits = Embedding(as_bits, ("int8", "fp8"))
host = Embedding(on_host)
