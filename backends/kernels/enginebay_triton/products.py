"""Products of blocks of rows with plain or quantised weights, as the ops linear and grouped_linear
use them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from enginebay.weights import QuantizedArray, Weight
from enginebay_triton.call import Launch, Launcher, require_versions

require_versions()

from enginebay_triton.linear_kernels import linear_kernel  # noqa: E402  # needs Triton

FEW, MANY = 16, 64
"""Rows of a block: the smallest product of tensor cores, and a size for longer prompts."""

WIDTH = 64
"""Outputs of a program."""

LINE, WIDE_LINE = 128, 32
"""Bytes of a row of a weight that a program loads per step, at most; the second number is for f32
rows, whose exact products use no tensor cores and many registers.
"""

SMALLEST_INT = 32
"""Inputs of the smallest product of integers of tensor cores."""

PACKED = {"int4": "int4", "uint4": "uint4", "float8_e4m3fn": "fp8"}
"""Dtypes that the kernel reads as bytes, and its names for them."""


@dataclasses.dataclass(frozen=True)
class RowBlocks:
    """Blocks of rows: block i has the rows first[i] to end[i] - 1, multiplied by weight group[i].

    All arrays are int32 [blocks]; a block has at most `rows` rows.
    """

    group: jax.Array
    first: jax.Array
    end: jax.Array
    rows: int


@dataclasses.dataclass(frozen=True)
class StoredMatrices:
    """Weights as the kernel reads them: values [groups, outputs, inputs], or bytes with two inputs.

    scales and zero_points are [groups, outputs, shares]; of one number where there are none.
    """

    values: jax.Array
    form: str = "plain"
    scales: jax.Array | None = None
    zero_points: jax.Array | None = None

    @classmethod
    def of(cls, weight: Weight, groups: int, inputs: int) -> StoredMatrices:
        """Return a weight of `groups` matrices, each [outputs, inputs]."""
        if not isinstance(weight, QuantizedArray):
            return cls(weight.reshape(groups, -1, inputs))
        values = weight.values.reshape(groups, -1, inputs)
        form = PACKED.get(str(values.dtype), "plain")
        shares = weight.scales.shape[-1]
        if form in ("int4", "uint4") and inputs // shares % 2:
            values, form = (
                values.astype(jnp.int8),
                "plain",
            )  # a byte would have values of two shares
        elif form in ("int4", "uint4"):
            pairs = values.reshape(*values.shape[:2], inputs // 2, 2)
            values = jax.lax.bitcast_convert_type(pairs, jnp.uint8)
        elif form == "fp8":
            values = jax.lax.bitcast_convert_type(values, jnp.uint8)
        points = weight.zero_points
        shape = (*values.shape[:2], shares)
        return cls(
            values,
            form,
            weight.scales.reshape(shape),
            None if points is None else points.reshape(shape),
        )


def launch_products(
    launcher: Launcher,
    x: jax.Array,
    weights: StoredMatrices,
    blocks: RowBlocks,
    splits: int,
    dtype: Any,
) -> jax.Array:
    """Return the products [splits, T, outputs] of x [T, inputs]; their sum is the result.

    The rows of no block are not written.
    """
    (rows, inputs), (_, outputs, stored) = x.shape, weights.values.shape
    if stored < inputs:
        x = x.reshape(rows, stored, 2).swapaxes(1, 2).reshape(rows, inputs)
    nothing = jnp.zeros(1, jnp.float32)  # the kernel needs an address, and does not read it
    scales = nothing if weights.scales is None else weights.scales
    points = nothing if weights.zero_points is None else weights.zero_points
    shares = 1 if weights.scales is None else scales.shape[-1]
    line = WIDE_LINE if x.dtype == jnp.float32 else LINE
    depth = _depth(stored // shares, weights.values.dtype.itemsize, line)
    how = Launch(
        (blocks.group.shape[0], -(-outputs // WIDTH), splits),
        (jax.ShapeDtypeStruct((splits, rows, outputs), dtype),),
        {
            "NUM_ROWS": rows,
            "INPUTS": inputs,
            "OUTPUTS": outputs,
            "ROWS": blocks.rows,
            "WIDTH": WIDTH,
            "DEPTH": depth,
            "SHARES": shares,
            "FORM": weights.form,
            "PACKED": stored < inputs,
            "HAS_SCALES": weights.scales is not None,
            "HAS_POINTS": weights.zero_points is not None,
            "AS_INT": x.dtype == jnp.int8 and depth >= SMALLEST_INT and weights.form != "fp8",
            "SPLITS": splits,
            "PRECISION": "ieee" if x.dtype == jnp.float32 else "tf32",
        },
        num_stages=4,
    )
    arrays = [x, weights.values, scales, points, blocks.group, blocks.first, blocks.end]
    (out,) = launcher(linear_kernel, arrays, how)
    return out


def most_rows(x: jax.Array) -> int:
    """Return the rows of the largest block of x."""
    return FEW if x.dtype == jnp.float32 else MANY


def _depth(share: int, itemsize: int, line: int) -> int:
    """Return the numbers of a row of a weight that a program loads per step: within one share."""
    depth = 1 << max(share - 1, 0).bit_length()
    return max(16, min(line // itemsize, depth))
