"""The grouped product of `jax.experimental.pallas.ops.tpu.megablox`."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox import gmm

from enginebay.errors import UnsupportedError

TILE = 128


@dataclasses.dataclass(frozen=True)
class MegabloxGroupedLinear:
    """The op grouped_linear; GroupedLinearOp describes it. Plain weights only."""

    is_interpreted: bool = False

    def interpreted(self) -> MegabloxGroupedLinear:
        """Return the same kernel, interpreted by Pallas."""
        return dataclasses.replace(self, is_interpreted=True)

    def __call__(
        self,
        x: jax.Array,
        weight: jax.Array,
        group_sizes: jax.Array,
        *,
        out_dtype: jnp.dtype | str | None = None,
    ) -> jax.Array:
        """Return [T, outputs] in `out_dtype` or x's dtype, for x [T, inputs], weight [groups,
        outputs, inputs] and group_sizes int32 [groups].
        """
        if x.dtype == jnp.float16:
            raise UnsupportedError("float16", "float32 or bfloat16", "Choose another kernel.")
        rows, outputs = len(x), weight.shape[1]
        dtype = jnp.dtype(out_dtype or x.dtype)
        if not rows:
            return jnp.zeros((0, outputs), dtype)
        padded = jnp.pad(x, ((0, -rows % TILE), (0, 0)))
        made = gmm(
            padded,
            weight,
            group_sizes,
            preferred_element_type=jnp.float32,
            tiling=(TILE, TILE, TILE),
            transpose_rhs=True,
            interpret=self.is_interpreted,
        )
        has_group = jnp.arange(rows) < group_sizes.sum()
        return jnp.where(has_group[:, None], made[:rows], 0).astype(dtype)


grouped_linear = MegabloxGroupedLinear()
