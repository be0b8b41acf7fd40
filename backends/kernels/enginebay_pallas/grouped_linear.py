"""The op grouped_linear on TPUs. Each block has rows of one group; each weight is read once."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from enginebay.weights import Weight
from enginebay_pallas.interpret import interpreting
from enginebay_pallas.products import Matrices, block_rows, multiply, prepared_rows


@dataclasses.dataclass(frozen=True)
class PallasGroupedLinear:
    """The op grouped_linear; GroupedLinearOp describes it. float16 is computed as f32 on TPUs."""

    is_interpreted: bool = False

    def interpreted(self) -> PallasGroupedLinear:
        """Return the same kernel, run by Pallas' TPU interpreter."""
        return dataclasses.replace(self, is_interpreted=True)

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
        rows, (groups, outputs) = x.shape[0], weight.shape[:2]
        dtype = jnp.dtype(out_dtype or x.dtype)
        if rows == 0:
            return jnp.zeros((0, outputs), dtype)
        x, x_scales = prepared_rows(x, weight, is_interpreted=self.is_interpreted)
        block = block_rows(rows, groups, x)
        counts, ends = -(-group_sizes // block), jnp.cumsum(group_sizes)
        last = jnp.cumsum(counts)
        starts, first_block = ends - group_sizes, last - counts
        # At most this many blocks have rows. Later blocks repeat the index of the last one with
        # rows.
        place = jnp.minimum(
            jnp.arange(rows // block + min(groups, rows)), jnp.maximum(last[-1] - 1, 0)
        )
        group = jnp.minimum(jnp.searchsorted(last, place, side="right"), groups - 1)
        first = starts[group] + (place - first_block[group]) * block
        taken = jnp.minimum(first[:, None] + jnp.arange(block), rows - 1).reshape(-1)
        run = interpreting(multiply) if self.is_interpreted else multiply
        numbers = (group.astype(jnp.int32), last[-1:].astype(jnp.int32))
        matrices = Matrices.of(weight, groups, x.shape[1])
        made = run(*numbers, x[taken], matrices, out_dtype=jnp.float32)
        row = jnp.arange(rows)
        mine = jnp.minimum(jnp.searchsorted(ends, row, side="right"), groups - 1)
        out = made[jnp.maximum(first_block[mine] * block + row - starts[mine], 0)]
        if x_scales is not None:
            out = out * x_scales
        return jnp.where((row < ends[-1])[:, None], out, 0.0).astype(dtype)


grouped_linear = PallasGroupedLinear()
