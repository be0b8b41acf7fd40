"""The rotation of heads before a cache quantises them.

Keys of trained models have a few channels that are much larger than the others. One scale for all
channels of a head then leaves few codes to the others. An orthogonal matrix R with entries of
almost equal size mixes the channels, so that all become about equally large. Scores do not change,
because R q . R k = q . k, and an output of rotated values is rotated back once.

R is the Kronecker product of the discrete Hartley transform of the odd factor of head_dim and the
Hadamard matrix of the power of two. Both are symmetric, so R is its own inverse. No entry is above
sqrt(2 / head_dim); where head_dim is a power of two, all are 1 / sqrt(head_dim).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.ops.spec import AttnSpec

ROTATED = frozenset({"int8", "uint4"})
"""The storages of keys and values whose heads are rotated. Codes of floats have room for large
channels beside small ones.
"""


def rotated_widths(spec: AttnSpec) -> tuple[int, ...]:
    """Return the widths of the parts of a key that are rotated separately; () if the cache stores
    heads as they are. Where values are the first columns of the keys, these columns are one part.
    """
    if spec.kv_storage not in ROTATED:
        return ()
    if spec.v_is_k_prefix and spec.v_dim < spec.head_dim:
        return (spec.v_dim, spec.head_dim - spec.v_dim)
    return (spec.head_dim,)


@functools.cache
def rotation(width: int) -> np.ndarray:
    """Return R [width, width] in f64: orthogonal, symmetric, and so its own inverse."""
    odd = width // (width & -width)
    angles = 2 * np.pi * np.outer(np.arange(odd), np.arange(odd)) / odd
    found = (np.cos(angles) + np.sin(angles)) / np.sqrt(odd)
    while len(found) < width:
        found = np.block([[found, found], [found, -found]]) / np.sqrt(2)
    return found


def rotate(x: jax.Array, widths: Sequence[int]) -> jax.Array:
    """Return x [..., head_dim] with its first columns rotated, by parts of `widths`, as far as x is
    wide. Another call undoes it. Products are sums in f32; the result has the dtype of x.
    """
    parts, begin = [], 0
    for width in widths:
        if begin < x.shape[-1]:
            part = x[..., begin : begin + width].astype(jnp.float32)
            matrix = jnp.asarray(rotation(width), jnp.float32)
            parts.append(jnp.matmul(part, matrix, precision=jax.lax.Precision.HIGHEST))
        begin += width
    return jnp.concatenate(parts, axis=-1).astype(x.dtype) if parts else x


def rotate_on_host(x: np.ndarray, widths: Sequence[int]) -> np.ndarray:
    """Return `rotate` of f32 x, computed in f64: codes that are rotated back and again have the
    same bytes.
    """
    found, begin = x.copy(), 0
    for width in widths:
        part = slice(begin, begin + width)
        if begin < x.shape[-1]:
            found[..., part] = x[..., part].astype(np.float64) @ rotation(width)
        begin += width
    return found
