"""The op grouped_linear in Triton. Each block has rows of one group, and reads its weight only."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from enginebay.ops.activations import require_row_scales, rounded_rows
from enginebay.weights import FLOAT, QuantizedArray, Weight
from enginebay_triton.call import Launcher, launch
from enginebay_triton.interpreter import interpret, require
from enginebay_triton.products import FEW, RowBlocks, StoredMatrices, launch_products, most_rows


@dataclasses.dataclass(frozen=True)
class GroupedLinear:
    """The op grouped_linear; GroupedLinearOp describes it."""

    launcher: Launcher = launch

    def interpreted(self) -> GroupedLinear:
        """Return the same op in Triton's interpreter; raises UnsupportedError without Triton."""
        require()
        return dataclasses.replace(self, launcher=interpret)

    def __call__(
        self,
        x: jax.Array,
        weight: Weight,
        group_sizes: jax.Array,
        *,
        out_dtype: jnp.dtype | str | None = None,
    ) -> jax.Array:
        """Multiply the rows of each group by the weight of the group.

        x is [T, inputs], group_sizes int32 [groups]; weight is [groups, outputs, inputs]. Returns
        [T, outputs] in `out_dtype` or x's dtype.
        """
        (rows, inputs), (groups, outputs) = x.shape, weight.shape[:2]
        dtype = jnp.dtype(out_dtype or x.dtype)
        if rows == 0:
            return jnp.zeros((0, outputs), dtype)
        x_scales = None
        if isinstance(weight, QuantizedArray) and weight.activations != FLOAT:
            require_row_scales(weight.activations)
            x, x_scales = rounded_rows(x)
        block = FEW if rows <= FEW * groups else most_rows(x)
        counts, ends = -(-group_sizes // block), jnp.cumsum(group_sizes)
        last = jnp.cumsum(counts)
        place = jnp.arange(rows // block + min(groups, rows))
        group = jnp.minimum(jnp.searchsorted(last, place, side="right"), groups - 1)
        first = ends[group] - group_sizes[group] + (place - (last - counts)[group]) * block
        group, first, end = (array.astype(jnp.int32) for array in (group, first, ends[group]))
        matrices = StoredMatrices.of(weight, groups, inputs)
        blocks = RowBlocks(group, first, end, block)
        out = launch_products(self.launcher, x, matrices, blocks, 1, jnp.float32)[0]
        if x_scales is not None:
            out = out * x_scales
        # No program writes the rows after the last group.
        return jnp.where((jnp.arange(rows) < ends[-1])[:, None], out, 0.0).astype(dtype)


grouped_linear = GroupedLinear()
