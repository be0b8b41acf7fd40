"""Products of blocks of rows with plain or quantised weights: the kernel of the ops linear and
grouped_linear.

Values of a quantised weight are widened in VMEM, a block at a time. Their products are exact, and
scales and zero points are applied to sums of products, in f32.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from enginebay.ops.activations import require_row_scales, rounded_rows
from enginebay.weights import FLOAT, QuantizedArray, Weight
from enginebay_pallas.generations import LANES, MIB, multiplies_int8, round_up

WEIGHT_BYTES = 2 * MIB
"""Bytes of a block of a weight. Two blocks are in VMEM at a time."""

ROW_BYTES = 4 * MIB
"""Bytes of a block of rows, at most. Two blocks are in VMEM at a time."""


@dataclasses.dataclass(frozen=True)
class Matrices:
    """Weights as the kernel reads them.

    values [groups, outputs, inputs]. scales and zero_points: f32 [groups, shares, outputs], each
    number is for an equal share of the inputs; None where all are 1, or 0.
    """

    values: jax.Array
    scales: jax.Array | None = None
    zero_points: jax.Array | None = None

    @classmethod
    def of(cls, weight: Weight, groups: int, inputs: int) -> Matrices:
        """Return a weight of `groups` matrices, each [outputs, inputs]."""
        if not isinstance(weight, QuantizedArray):
            return cls(_without_f16(weight.reshape(groups, -1, inputs)))
        values = weight.values.reshape(groups, -1, inputs)

        def by_share(factors: jax.Array) -> jax.Array:
            shape = (*values.shape[:2], factors.shape[-1])
            return factors.reshape(shape).swapaxes(1, 2).astype(jnp.float32)

        points = None if weight.zero_points is None else by_share(weight.zero_points)
        return cls(values, by_share(weight.scales), points)


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Static parameters of a call. A chunk of the inputs has `per_chunk` whole shares."""

    rows: int
    width: int
    chunk: int
    per_chunk: int
    has_scales: bool
    has_points: bool


def multiply(
    group: jax.Array, used: jax.Array, x: jax.Array, weights: Matrices, *, out_dtype: Any
) -> jax.Array:
    """Return the products [blocks * rows, outputs] of the first `used` [1] blocks of x.

    x is [blocks * rows, inputs]; block i is multiplied by the matrix `group[i]`. Sums are f32, or
    int32 for x of int8. The rows of other blocks are not written.
    """
    _, outputs, inputs = weights.values.shape
    factors = [each for each in (weights.scales, weights.zero_points) if each is not None]
    shares = factors[0].shape[1] if factors else 1
    bits = jax.dtypes.itemsize_bits(weights.values.dtype)
    chunk = math.lcm(inputs // shares, LANES)
    chunk = chunk if shares > 1 and inputs % chunk == 0 else inputs
    tiling = Tiling(
        rows=x.shape[0] // group.shape[0],
        width=_width(outputs, inputs * bits // 8),
        chunk=chunk,
        per_chunk=shares * chunk // inputs,
        has_scales=weights.scales is not None,
        has_points=weights.zero_points is not None,
    )
    by_width = pl.BlockSpec((1, shares, tiling.width), lambda o, i, group, _: (group[i], 0, o))
    products: jax.Array = pl.pallas_call(
        functools.partial(_kernel, tiling),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], outputs), out_dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            # The blocks of a group are consecutive, so that its weight is read once.
            grid=(outputs // tiling.width, group.shape[0]),
            in_specs=[
                pl.BlockSpec((tiling.rows, inputs), lambda _, i, *__: (i, 0)),
                pl.BlockSpec((1, tiling.width, inputs), lambda o, i, group, _: (group[i], o, 0)),
                *[by_width for _ in factors],
            ],
            out_specs=pl.BlockSpec((tiling.rows, tiling.width), lambda o, i, *_: (i, o)),
        ),
        name="products",
    )(group, used, x, weights.values, *factors)
    return products


def prepared_rows(
    x: jax.Array, weight: Weight, *, is_interpreted: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Return x [T, inputs] as the kernel multiplies it, and factors f32 [T, 1] of its results.

    Rounded rows are int8, or bfloat16 where the TPU does not multiply int8.
    """
    if not isinstance(weight, QuantizedArray) or weight.activations == FLOAT:
        return _without_f16(x), None
    require_row_scales(weight.activations)
    values, scales = rounded_rows(x)
    as_int = weight.values.dtype != jnp.float8_e4m3fn and (is_interpreted or multiplies_int8())
    return values if as_int else values.astype(jnp.bfloat16), scales


def block_rows(rows: int, groups: int, x: jax.Array) -> int:
    """Return the rows of a block: a tile of x's dtype, or up to as many as a matrix unit has."""
    few = 32 if x.dtype == jnp.int8 else 16
    if rows <= few * groups:
        return few
    fit = ROW_BYTES // (x.shape[-1] * x.dtype.itemsize) // few * few
    return max(few, min(128, fit, round_up(rows, few)))


def _without_f16(x: jax.Array) -> jax.Array:
    """TPUs have no float16."""
    return x.astype(jnp.float32) if x.dtype == jnp.float16 else x


def _width(outputs: int, row_bytes: int) -> int:
    """Return the outputs of a block: whole tiles that divide all outputs, within WEIGHT_BYTES.

    All outputs where there is no such number.
    """
    fit = [
        n
        for n in range(LANES, outputs, LANES)
        if outputs % n == 0 and n * row_bytes <= WEIGHT_BYTES
    ]
    smallest = LANES if outputs % LANES == 0 else outputs
    return outputs if outputs * row_bytes <= WEIGHT_BYTES else max(fit, default=smallest)


def _kernel(tiling: Tiling, group: Any, used: Any, x: Any, weight: Any, *others: Any) -> None:
    *factors, out = others

    @pl.when(pl.program_id(1) < used[0])
    def _() -> None:
        inputs = x.shape[1]
        if tiling.chunk == inputs:
            total = _chunk(tiling, x[...], weight[0], factors, 0)
        else:
            total = lax.fori_loop(
                0,
                inputs // tiling.chunk,
                functools.partial(_add_chunk, tiling, x, weight, factors),
                jnp.zeros(out.shape, jnp.float32),
            )
        out[...] = total.astype(out.dtype)


def _add_chunk(tiling: Tiling, x: Any, weight: Any, factors: Any, i: Any, total: Any) -> Any:
    columns = pl.ds(pl.multiple_of(i * tiling.chunk, tiling.chunk), tiling.chunk)
    share = i * tiling.per_chunk
    return total + _chunk(tiling, x[:, columns], weight[0, :, columns], factors, share)


def _chunk(tiling: Tiling, x: jax.Array, weight: jax.Array, factors: Any, first: Any) -> jax.Array:
    """Return the products of a chunk, f32 [rows, width].

    x is [rows, chunk], weight [width, chunk]; factors are references to scales and zero points [1,
    shares, width], and `first` is the first share of the chunk. With several shares in a chunk, x
    is stacked once per share, where all but the share is 0. So one product has the sums of each
    share, and no share is cut out of a tile.
    """
    rows, count = tiling.rows, tiling.per_chunk
    if count > 1:
        owner = lax.broadcasted_iota(jnp.int32, x.shape, 1) // (tiling.chunk // count)
        x = jnp.concatenate([jnp.where(owner == i, x, jnp.zeros_like(x)) for i in range(count)])
    is_wide = x.dtype == jnp.float32
    sums = lax.dot_general(
        x,
        weight if weight.dtype == x.dtype else weight.astype(x.dtype),
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if is_wide else None,
        preferred_element_type=jnp.int32 if x.dtype == jnp.int8 else jnp.float32,
    ).astype(jnp.float32)
    of_rows = jnp.sum(x.astype(jnp.float32), axis=1, keepdims=True) if tiling.has_points else None
    total = jnp.zeros((rows, sums.shape[1]), jnp.float32)
    for i in range(count):
        mine, share = slice(i * rows, (i + 1) * rows), pl.ds(first + i, 1)
        part = sums[mine]
        if of_rows is not None:
            part = part - of_rows[mine] * factors[1][0, share, :]
        if tiling.has_scales:
            part = part * factors[0][0, share, :]
        total = total + part
    return total
