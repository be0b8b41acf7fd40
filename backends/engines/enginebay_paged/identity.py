"""Computes the identity of an engine: two engines with the same identity, in any processes, may
read each other's pages.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.contracts.adapters import ADAPTER_WEIGHTS
from enginebay.contracts.executor import EngineParts, Executor
from enginebay.contracts.model import Weights
from enginebay.ops.head_rotation import rotated_widths
from enginebay_runtime.geometry import Shapes

SEEDS = (0x9E3779B1, 0xC2B2AE3D)


def engine_identity(parts: EngineParts, shapes: Shapes, executor: Executor) -> str:
    """Return a hash over all that the bytes of a page depend on besides the tokens: the weights,
    the model's constants, dtypes, cache layouts, rotation of heads, kernels, and the version of
    enginebay.
    UnsupportedError when the weights are not in this process.
    """
    layouts = {
        group: str(layout.resized(num_pages=1)) for group, layout in parts.layouts(shapes).items()
    }
    facts = [
        importlib.metadata.version("enginebay"),
        [parts.model.info.family, parts.model.info.constants],
        [parts.dtype, str(parts.weight_format)],
        sorted(layouts.items()),
        sorted((group, rotated_widths(spec)) for group, spec in parts.model.info.attention.items()),
        sorted(parts.kernels.items()),
        weights_digest(executor.weights()),
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def weights_digest(weights: Weights) -> str:
    """Return a hash over the names, shapes, dtypes and values of all weights, without adapters, and
    over the forms of quantised ones, such as whether products round their inputs.

    The devices sum each array twice, multiplied by numbers that depend on the position, modulo
    2**32. A change of one value always changes the sums; of other changes, one in 2**64 leaves both
    equal. The sums do not protect from an attacker. Each weight is read once.
    """
    sums = [
        (path, str(form), [(list(one.shape), str(one.dtype), _sums(one)) for one in arrays])
        for path in sorted(weights)
        if not path.startswith(ADAPTER_WEIGHTS)
        for arrays, form in [jax.tree.flatten(weights[path])]
    ]
    digest = hashlib.sha256()
    for path, form, arrays in sums:
        values = [(shape, dtype, np.asarray(pair).tolist()) for shape, dtype, pair in arrays]
        digest.update(json.dumps([path, form, values]).encode())
    return digest.hexdigest()


@jax.jit
def _sums(array: jax.Array) -> jax.Array:
    """uint32 [2]: two sums over the bits of an array."""
    bits = _bits(array)
    place = jnp.zeros(array.shape, jnp.uint32)
    for axis in range(array.ndim):  # no reshape, so that each device sums its own part
        stride = jnp.uint32(math.prod(array.shape[axis + 1 :]) % 2**32)
        place = place + stride * jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis)
    # One reduction of both: XLA computes the terms in its loop. Two would store them on a CPU.
    terms, zero = [bits * _mixed(place, seed) for seed in SEEDS], jnp.uint32(0)
    sums = jax.lax.reduce(terms, [zero] * len(SEEDS), _added, range(array.ndim))
    return jnp.stack(sums)


def _added(mine: Sequence[jax.Array], other: Sequence[jax.Array]) -> list[jax.Array]:
    return [a + b for a, b in zip(mine, other, strict=True)]


def _bits(array: jax.Array) -> jax.Array:
    size = jax.dtypes.itemsize_bits(array.dtype)
    if size < 8 or array.dtype == jnp.bool_:
        return array.astype(jnp.int32).astype(jnp.uint32)
    kinds = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}
    return jax.lax.bitcast_convert_type(array, kinds[size]).astype(jnp.uint32)


def _mixed(place: jax.Array, seed: int) -> jax.Array:
    """An odd number for each position."""
    mixed = (place + jnp.uint32(seed)) * jnp.uint32(seed)
    mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(0x85EBCA77)
    return (mixed ^ (mixed >> 13)) | jnp.uint32(1)
