"""Products with quantised weights in C++. Kernels for each form multiply few rows and rounded rows;
others are multiplied in panels of dequantised outputs.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.ops.activations import INT8, INT8_GROUP, rounded_groups, rounded_rows
from enginebay.weights import FLOAT, QuantizedArray
from enginebay_native.calls import register

FEWEST_INPUTS = 16
"""Inputs of the smallest group with a scale of its own."""

INT4 = (jnp.dtype(jnp.int4), jnp.dtype(jnp.uint4))
POINTS = {jnp.dtype(jnp.int8): (False, True), INT4[0]: (False,), INT4[1]: (True,)}
"""dtypes of values -> whether there may be zero points."""

FORMS = {"int8": "s8", "int4": "s4", "uint4": "u4"}
"""dtypes of values, each with the end of the name of its library."""

LIBRARIES = {
    FLOAT: "quantized_linear",
    INT8: "rounded_linear",
    INT8_GROUP: "group_rounded_linear",
}
"""Beginnings of the names of libraries, by how they round rows."""

PACKED = {"int8_group": "s8", "int4": "s4", "uint4": "u4"}
"""The same for methods of quantisation with a scale for each group of inputs."""

SCALES = (jnp.dtype(jnp.float32), jnp.dtype(jnp.float16))

LINE, TILE_ROWS = 128, 16
"""The workspace of a call has room for multiples of so many inputs and rows."""


def is_served(weight: QuantizedArray) -> bool:
    """Return whether `in_cpp` multiplies with weights of this form."""
    num_in = math.prod(weight.values.shape[weight.scales.ndim - 1 :])
    groups = weight.scales.shape[-1]
    size, has_points = num_in // groups, weight.zero_points is not None
    return (
        has_points in POINTS.get(weight.values.dtype, ())
        and weight.scales.dtype in SCALES
        and (groups == 1 or (size >= FEWEST_INPUTS and size & (size - 1) == 0))
        and (weight.values.dtype not in INT4 or num_in % 2 == 0)
    )


def library_of(weight: QuantizedArray) -> str:
    """Return the name of the library that multiplies with weights of this form."""
    form = FORMS[str(weight.values.dtype)]
    if form == "s8" and weight.zero_points is not None:
        form = "zeros_s8"
    return f"{LIBRARIES[weight.activations]}_{form}"


def in_cpp(
    x: jax.Array,
    weight: QuantizedArray,
    *,
    sizes: jax.Array | None = None,
    block_bytes: int,
    tasks_per_thread: int,
) -> jax.Array:
    """Return x f32 [rows, inputs] times the transposed weight: f32 [rows, outputs]. The rows are
    rounded in the call if `weight.activations` is not FLOAT.

    With `sizes`, int32 [weights], the first axis of `weight` counts several weights, and weight i
    has the next sizes[i] rows. `is_served(weight)` must hold, and there must be at least one row.
    """
    rows, num_in = x.shape
    every, is_rounded = math.prod(weight.scales.shape[:-1]), weight.activations != FLOAT
    outputs = every if sizes is None else every // sizes.shape[0]
    padded_rows = -(-rows // TILE_ROWS) * TILE_ROWS if is_rounded else rows
    row_bytes = (5 if weight.activations == INT8_GROUP else 4) * (-(-num_in // LINE) * LINE) + 64
    results = (
        jax.ShapeDtypeStruct((rows, outputs), jnp.float32),
        jax.ShapeDtypeStruct((padded_rows * row_bytes + 1024,), jnp.int8),
    )
    points = weight.zero_points
    out, _ = jax.ffi.ffi_call(register(library_of(weight)), results)(
        x,
        weight.values.reshape(every, num_in),
        weight.scales.reshape(every, -1),
        jnp.zeros((0, 0), weight.scales.dtype) if points is None else points.reshape(every, -1),
        jnp.zeros(0, jnp.int32) if sizes is None else sizes,
        block_bytes=np.int64(block_bytes),
        tasks_per_thread=np.int64(tasks_per_thread),
    )
    return out


def in_panels(x: jax.Array, weight: QuantizedArray, sizes: jax.Array | None = None) -> jax.Array:
    """Return the same product for many rows, and for the forms that `is_served` refuses. The call
    dequantises some outputs at a time.
    """
    rows, num_in = x, x.shape[1]
    every, points = math.prod(weight.scales.shape[:-1]), weight.zero_points
    outputs = every if sizes is None else every // sizes.shape[0]
    factors = jnp.float32(1)
    if weight.activations == INT8_GROUP:
        rows = rounded_groups(x)
    elif weight.activations != FLOAT:
        values, factors = rounded_rows(x)
        rows = values.astype(jnp.float32)
    wide = [
        jnp.zeros((0, 0), jnp.float32)
        if array is None
        else array.reshape(every, -1).astype(jnp.float32)
        for array in (weight.scales, points)
    ]
    made = jax.ShapeDtypeStruct((x.shape[0], outputs), jnp.float32)
    call = jax.ffi.ffi_call(register("panel_linear"), made)
    counts = jnp.zeros(0, jnp.int32) if sizes is None else sizes
    out: jax.Array = call(rows, weight.values.reshape(every, num_in), *wide, counts)
    return out * factors
