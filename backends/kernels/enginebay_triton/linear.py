"""The op linear on GPUs: products with quantised weights in Triton, others by XLA."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from enginebay.ops.activations import require_row_scales, rounded_rows
from enginebay.ops.products import plain_product
from enginebay.weights import FLOAT, QuantizedArray, Weight
from enginebay_triton.call import Launcher, launch
from enginebay_triton.interpreter import interpret, require
from enginebay_triton.products import (
    FEW,
    MANY,
    WIDTH,
    RowBlocks,
    StoredMatrices,
    launch_products,
    most_rows,
)

PROGRAMS = 256
"""Programs that fill a GPU: two for each of its cores, of which there are 108 to 148."""

MOST_SPLITS = 8
"""Splits of the inputs, at most. Each split writes a result of its own, which is read again."""

SHORTEST_SPLIT = 512
"""Inputs of a split, at least."""


@dataclasses.dataclass(frozen=True)
class TritonLinear:
    """The op linear; LinearOp describes it."""

    launcher: Launcher = launch

    def interpreted(self) -> TritonLinear:
        """Return the same op in Triton's interpreter; raises UnsupportedError without Triton."""
        require()
        return dataclasses.replace(self, launcher=interpret)

    def __call__(
        self,
        x: jax.Array,
        weight: Weight,
        bias: jax.Array | None = None,
        *,
        out_dtype: jnp.dtype | str | None = None,
    ) -> jax.Array:
        """Return x times the transposed weight, plus the bias, in `out_dtype` or x's dtype.

        x is [T, *in_dims], weight [*out_dims, *in_dims], bias [*out_dims]; the result is
        [T, *out_dims]. Sums and the bias are f32, rounded once.
        """
        out_dims = weight.shape[: weight.ndim - (x.ndim - 1)]
        flat = x.reshape(x.shape[0], math.prod(x.shape[1:]))
        dtype = jnp.dtype(out_dtype or x.dtype)
        if isinstance(weight, QuantizedArray):
            made = jnp.dtype(jnp.float32) if bias is not None else dtype
            out = self._quantized(flat, weight, made)
        else:
            out = plain_product(flat, weight.reshape(-1, flat.shape[1]))
        out = out.reshape(x.shape[0], *out_dims)
        if bias is not None:
            out = out + bias.astype(jnp.float32)
        return out.astype(dtype)

    def _quantized(self, x: jax.Array, weight: QuantizedArray, dtype: Any) -> jax.Array:
        """Return the products [T, outputs] in `dtype`, or in f32 where they are summed later."""
        rows, inputs = x.shape
        matrices = StoredMatrices.of(weight, 1, inputs)
        outputs = matrices.values.shape[1]
        if rows == 0:
            return jnp.zeros((0, outputs), dtype)
        x_scales = None
        if weight.activations != FLOAT:
            require_row_scales(weight.activations)
            x, x_scales = rounded_rows(x)
        block = max(FEW, min(most_rows(x), 1 << (rows - 1).bit_length()))
        # A row's sums have the same order in every batch of up to MANY rows.
        splits = _splits(outputs, inputs) if rows <= MANY else 1
        first = jnp.arange(0, rows, block, dtype=jnp.int32)
        blocks = RowBlocks(jnp.zeros_like(first), first, jnp.full_like(first, rows), block)
        whole = splits == 1 and x_scales is None
        made = dtype if whole else jnp.float32
        out = launch_products(self.launcher, x, matrices, blocks, splits, made)
        out = out[0] if splits == 1 else out.sum(axis=0)
        return out if x_scales is None else out * x_scales


def _splits(outputs: int, inputs: int) -> int:
    """Return how many programs share the inputs of an output, where there are few outputs."""
    wanted = PROGRAMS // -(-outputs // WIDTH)
    most = min(MOST_SPLITS, wanted, inputs // SHORTEST_SPLIT)
    return 1 << (max(1, most).bit_length() - 1)


linear = TritonLinear()
