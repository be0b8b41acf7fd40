"""Products of matrices, x [T, n] times the transpose of w [O, n] in f32, summed in the many ways in
which kernels do it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

ProductWay = Callable[[jax.Array, jax.Array], jax.Array]
"""Arrays of any float dtypes; the result is f32 [T, O]."""


def plain(x: jax.Array, w: jax.Array) -> jax.Array:
    """One product of f32."""
    return jnp.einsum(
        "ti,oi->to",
        x.astype(jnp.float32),
        w.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )


def narrow(x: jax.Array, w: jax.Array) -> jax.Array:
    """One product in the wider of the two dtypes, with sums in f32."""
    wide = jnp.promote_types(x.dtype, w.dtype)
    precision = jax.lax.Precision.HIGHEST
    numbers = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(
        x.astype(wide), w.astype(wide), numbers, precision, preferred_element_type=jnp.float32
    )


def transposed(x: jax.Array, w: jax.Array) -> jax.Array:
    """The weight is the left factor."""
    return plain(w, x).T


def backwards(x: jax.Array, w: jax.Array) -> jax.Array:
    """The last input first."""
    return plain(x[:, ::-1], w[:, ::-1])


def by_sums(x: jax.Array, w: jax.Array) -> jax.Array:
    """One row after the other, as sums of products of numbers."""
    wide = w.astype(jnp.float32)
    return jax.lax.map(lambda row: (row * wide).sum(axis=1), x.astype(jnp.float32))


def _cut(x: jax.Array, size: int) -> jax.Array:
    """x [T, n] as [parts, T, size], with zeros after the last input."""
    parts = max(1, -(-x.shape[1] // size))
    padded = jnp.pad(x, ((0, 0), (0, parts * size - x.shape[1])))
    return padded.reshape(x.shape[0], parts, size).swapaxes(0, 1)


def split_inputs(x: jax.Array, w: jax.Array, *, parts: int) -> jax.Array:
    """Parts of the inputs have products of their own, which are added in order."""
    size = max(1, -(-x.shape[1] // parts))
    found = [plain(*pair) for pair in zip(_cut(x, size), _cut(w, size), strict=True)]
    return functools.reduce(jnp.add, found)


def strided_inputs(x: jax.Array, w: jax.Array, *, parts: int) -> jax.Array:
    """As split_inputs, but a part has every `parts`-th input."""
    found = [plain(x[:, i::parts], w[:, i::parts]) for i in range(min(parts, x.shape[1]))]
    return functools.reduce(jnp.add, found)


def pairwise(x: jax.Array, w: jax.Array) -> jax.Array:
    """Products of eight parts of the inputs, added as a tree."""
    size = max(1, -(-x.shape[1] // 8))
    found = [plain(*pair) for pair in zip(_cut(x, size), _cut(w, size), strict=True)]
    while len(found) > 1:
        last = found[-1:] if len(found) % 2 else []
        found = [a + b for a, b in zip(found[0::2], found[1::2], strict=False)] + last
    return found[0]


def compensated(x: jax.Array, w: jax.Array, *, size: int) -> jax.Array:
    """Products of `size` inputs at a time, added with what the sum before has lost."""

    def add(
        state: tuple[jax.Array, jax.Array], pair: tuple[jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, jax.Array], None]:
        total, lost = state
        new = plain(*pair) - lost
        higher = total + new
        return (higher, (higher - total) - new), None

    zeros = jnp.zeros((x.shape[0], w.shape[0]), jnp.float32)
    return jax.lax.scan(add, (zeros, zeros), (_cut(x, size), _cut(w, size)))[0][0]


def blocks_of_outputs(x: jax.Array, w: jax.Array, *, size: int) -> jax.Array:
    """So many outputs at a time; the last block has outputs of zeros."""
    count = -(-w.shape[0] // size)
    padded = jnp.pad(w, ((0, count * size - w.shape[0]), (0, 0)))
    blocks = padded.reshape(count, size, w.shape[1])
    _, found = jax.lax.scan(lambda _, block: (None, plain(x, block)), None, blocks)
    wide = found.swapaxes(0, 1).reshape(x.shape[0], count * size)
    return wide[:, : w.shape[0]]


def tiles(x: jax.Array, w: jax.Array, *, size: int) -> jax.Array:
    """Tiles of size * size numbers. What lies past the end of an array is anything, and is made 0
    before it is multiplied.
    """
    rows, inputs, outputs = x.shape[0], x.shape[1], w.shape[0]
    counts = [max(1, -(-each // size)) for each in (rows, inputs, outputs)]

    def tiled(array: jax.Array, count: int) -> jax.Array:
        missing = [(0, count * size - array.shape[0]), (0, counts[1] * size - inputs)]
        padded = jnp.pad(array.astype(jnp.float32), missing, constant_values=jnp.nan)
        return padded.reshape(count, size, counts[1], size).swapaxes(1, 2)

    inside = (jnp.arange(counts[1] * size) < inputs).reshape(counts[1], 1, size)
    left = jnp.where(inside, tiled(x, counts[0]), 0)
    right = jnp.where(inside, tiled(w, counts[2]), 0)

    def one(tile: jax.Array) -> jax.Array:
        highest = jax.lax.Precision.HIGHEST
        return jnp.einsum("rkti,koi->rto", left, tile, precision=highest)

    found = jax.lax.map(one, right)  # [output tiles, row tiles, size, size]
    found = found.transpose(1, 2, 0, 3).reshape(counts[0] * size, counts[2] * size)
    return found[:rows, :outputs]


def outer(x: jax.Array, w: jax.Array) -> jax.Array:
    """One input after the other, as a sum of outer products."""
    pairs = x.T.astype(jnp.float32), w.T.astype(jnp.float32)

    def add(total: jax.Array, pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return total + pair[0][:, None] * pair[1], None

    return jax.lax.scan(add, jnp.zeros((x.shape[0], w.shape[0]), jnp.float32), pairs)[0]


def on_host(x: jax.Array, w: jax.Array) -> jax.Array:
    """NumPy's product of f32."""

    def multiply(x: np.ndarray, w: np.ndarray) -> np.ndarray:
        return cast("np.ndarray", np.asarray(x) @ np.asarray(w).T)

    shape = jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), jnp.float32)
    found: jax.Array = jax.pure_callback(
        multiply, shape, x.astype(jnp.float32), w.astype(jnp.float32)
    )
    return found
