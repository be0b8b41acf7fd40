"""The op grouped_linear in C++: the weight of a group is read once for all its rows."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from enginebay.ops.activations import INT8
from enginebay.weights import FLOAT, QuantizedArray, Weight
from enginebay_native.calls import register
from enginebay_native.compiling import check_library
from enginebay_native.quantized import in_cpp, in_panels, is_served

MAX_NARROW_ROWS = 48
"""Rows per group, on average. With more, XLA's products in bf16 are faster (docs/native.md)."""

MAX_FLOAT_ROWS = 128
"""Rows of f32 per group, on average, that are multiplied with unpacked weights of other forms than
int8. More rows are multiplied in panels.
"""

BLOCK = 128
"""Rows of a block of XLA's products."""

# Every composition imports this module, but only models with experts need the library. So it is
# compiled when the first program with experts is traced.
check_library("grouped_linear")


@dataclasses.dataclass(frozen=True)
class NativeGroupedLinear:
    """The op grouped_linear in C++; many rows of bf16 are multiplied by XLA."""

    name: str = "native"

    def free_padding_rows(self, needs: Mapping[str, Collection[str]]) -> int:
        """Return the largest number of rows that are multiplied in C++, which skips zeros."""
        is_narrow = not needs.get("quantizations") and set(needs.get("dtypes", ())) == {"bfloat16"}
        return MAX_NARROW_ROWS if is_narrow else sys.maxsize

    def __call__(
        self,
        x: jax.Array,
        weight: Weight,
        group_sizes: jax.Array,
        *,
        out_dtype: jnp.dtype | str | None = None,
    ) -> jax.Array:
        """Multiply the rows of each group by the weight of the group.

        x is [T, inputs], group_sizes int32 [groups], weight [groups, outputs, inputs]. Returns [T,
        outputs] in `out_dtype` or x's dtype. Sums are f32 and rounded once. A group without rows,
        or with rows of zeros alone, costs nothing. In C++ the bits of a row's result do not depend
        on the other rows of T.
        """
        values: Any = weight
        scales = jnp.zeros(0, jnp.float32)
        if isinstance(weight, QuantizedArray):
            if not is_int8(weight):
                product = _quantized(x.astype(jnp.float32), weight, group_sizes)
                return product.astype(out_dtype or x.dtype)
            values, scales = weight.values, weight.scales[..., 0]
        is_narrow = x.dtype == values.dtype == jnp.bfloat16
        if is_narrow and x.shape[0] > MAX_NARROW_ROWS * values.shape[0]:
            return _in_blocks(x, values, group_sizes).astype(out_dtype or x.dtype)
        rows = x if is_narrow else x.astype(jnp.float32)
        made = jax.ShapeDtypeStruct((x.shape[0], values.shape[1]), jnp.float32)
        call = jax.ffi.ffi_call(register("grouped_linear"), made)
        out: jax.Array = call(rows, values, group_sizes, scales)
        return out.astype(out_dtype or x.dtype)


def is_int8(weight: QuantizedArray) -> bool:
    """Return whether a weight has int8 values with one scale per output, for inputs of floats."""
    return (
        weight.values.dtype == jnp.int8
        and weight.activations == FLOAT
        and weight.zero_points is None
        and weight.scales.shape[-1] == 1
    )


def _quantized(x: jax.Array, weight: QuantizedArray, group_sizes: jax.Array) -> jax.Array:
    """Compute the products with the other forms of weights, f32 [T, outputs]."""
    is_few = x.shape[0] <= MAX_FLOAT_ROWS * weight.shape[0] or weight.activations == INT8
    if x.shape[0] > 0 and is_few and is_served(weight):
        return in_cpp(x, weight, sizes=group_sizes, block_bytes=128 << 10, tasks_per_thread=4)
    return in_panels(x, weight, group_sizes)


def _in_blocks(x: jax.Array, weight: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Compute the products by XLA, in blocks of rows of one group: f32 [T, outputs]."""
    counts, ends = -(-group_sizes // BLOCK), jnp.cumsum(group_sizes)
    last = jnp.cumsum(counts)
    padded = jnp.pad(x, ((0, BLOCK), (0, 0)))

    def add(i: jax.Array, out: jax.Array) -> jax.Array:
        group = jnp.searchsorted(last, i, side="right").astype(jnp.int32)
        start = ends[group] - group_sizes[group] + (i - (last[group] - counts[group])) * BLOCK
        part = jax.lax.dot_general(
            jax.lax.dynamic_slice_in_dim(padded, start, BLOCK),
            jax.lax.dynamic_index_in_dim(weight, group, keepdims=False),
            (((1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        is_mine = (start + jnp.arange(BLOCK) < ends[group])[:, None]
        before = jax.lax.dynamic_slice_in_dim(out, start, BLOCK)
        return jax.lax.dynamic_update_slice_in_dim(
            out, jnp.where(is_mine, part, before), start, axis=0
        )

    out = jnp.zeros((padded.shape[0], weight.shape[1]), jnp.float32)
    return jax.lax.fori_loop(0, last[-1], add, out)[: x.shape[0]]


grouped_linear = NativeGroupedLinear()
