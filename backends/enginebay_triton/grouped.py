"""The op grouped_linear in Triton. Each block has rows of one group, and reads its weight only."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from enginebay.weights import QuantizedArray, Weight
from enginebay_triton.call import Launch, Launcher, launch, require_versions
from enginebay_triton.interpreter import interpret, require

require_versions()

from enginebay_triton.grouped_kernels import grouped_linear_kernel  # noqa: E402  # needs Triton

FEW, MANY = 16, 64
"""Rows of a block: the smallest product of tensor cores, and a size for longer prompts."""

WIDTH, DEPTH = 64, 64
"""Outputs of a program, and inputs per iteration."""


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

        x is [T, inputs], group_sizes int32 [groups]; weight is [groups, outputs, inputs], or int8
        values with one scale per output. Returns [T, outputs] in `out_dtype` or x's dtype.
        """
        values: Any = weight
        scales = jnp.zeros(1, jnp.float32)
        if isinstance(weight, QuantizedArray):
            values, scales = weight.values, weight.scales[..., 0]
        (rows, inputs), (groups, outputs) = x.shape, values.shape[:2]
        dtype = jnp.dtype(out_dtype or x.dtype)
        if rows == 0:
            return jnp.zeros((0, outputs), dtype)
        block = FEW if rows <= FEW * groups else MANY
        counts, ends = -(-group_sizes // block), jnp.cumsum(group_sizes)
        last = jnp.cumsum(counts)
        place = jnp.arange(rows // block + min(groups, rows))
        group = jnp.minimum(jnp.searchsorted(last, place, side="right"), groups - 1)
        first = ends[group] - group_sizes[group] + (place - (last - counts)[group]) * block
        numbers = [array.astype(jnp.int32) for array in (group, first, ends[group])]
        how = Launch(
            (place.shape[0], -(-outputs // WIDTH)),
            (jax.ShapeDtypeStruct((rows, outputs), jnp.float32),),
            {
                "INPUTS": inputs,
                "OUTPUTS": outputs,
                "ROWS": block,
                "WIDTH": WIDTH,
                "DEPTH": DEPTH,
                "HAS_SCALES": isinstance(weight, QuantizedArray),
                "PRECISION": "ieee" if x.dtype == jnp.float32 else "tf32",
            },
            num_stages=4,
        )
        (out,) = self.launcher(grouped_linear_kernel, [x, values, scales, *numbers], how)
        # No program writes the rows after the last group.
        return jnp.where((jnp.arange(rows) < ends[-1])[:, None], out, 0.0).astype(dtype)


grouped_linear = GroupedLinear()
