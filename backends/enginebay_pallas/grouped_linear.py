"""The op grouped_linear on TPUs. Each block has rows of one group; each weight is read once."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from enginebay.weights import QuantizedArray, Weight
from enginebay_pallas.generations import LANES, MIB
from enginebay_pallas.interpret import interpreting

FEW, MANY = 16, 128
"""Rows of a block: a tile of a 16-bit dtype, or enough rows for the matrix unit."""

WEIGHT_BYTES = 2 * MIB
"""Bytes of a block of a weight. Two blocks are in VMEM at a time."""


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

        x is [T, inputs], group_sizes int32 [groups]; weight is [groups, outputs, inputs], or int8
        values with one scale per output. Returns [T, outputs] in `out_dtype` or x's dtype.
        """
        values: Any = weight.values if isinstance(weight, QuantizedArray) else weight
        rows, (groups, outputs) = x.shape[0], values.shape[:2]
        dtype = jnp.dtype(out_dtype or x.dtype)
        if rows == 0:
            return jnp.zeros((0, outputs), dtype)
        block = FEW if rows <= FEW * groups else MANY
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
        narrow = jnp.float32 if x.dtype == jnp.float16 else x.dtype
        values = values.astype(jnp.float32) if values.dtype == jnp.float16 else values
        run = interpreting(_multiply) if self.is_interpreted else _multiply
        numbers = (group.astype(jnp.int32), last[-1:].astype(jnp.int32))
        made = run(*numbers, x[taken].astype(narrow), values)
        row = jnp.arange(rows)
        mine = jnp.minimum(jnp.searchsorted(ends, row, side="right"), groups - 1)
        out = made[jnp.maximum(first_block[mine] * block + row - starts[mine], 0)]
        if isinstance(weight, QuantizedArray):
            out = out * weight.scales[mine, :, 0]
        return jnp.where((row < ends[-1])[:, None], out, 0.0).astype(dtype)


def _multiply(group: jax.Array, used: jax.Array, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Return the f32 products of the first `used` [1] blocks of x [blocks * rows, inputs].

    Block i is multiplied by the weight `group[i]`.
    """
    (outputs, inputs), blocks = weight.shape[1:], group.shape[0]
    rows = x.shape[0] // blocks
    width = _width(outputs, inputs * weight.dtype.itemsize)
    products: jax.Array = pl.pallas_call(
        _kernel,
        out_shape=jax.ShapeDtypeStruct((x.shape[0], outputs), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            # The blocks of a group are consecutive, so that its weight is read once.
            grid=(outputs // width, blocks),
            in_specs=[
                pl.BlockSpec((rows, inputs), lambda _, i, *__: (i, 0)),
                pl.BlockSpec((1, width, inputs), lambda o, i, group, _: (group[i], o, 0)),
            ],
            out_specs=pl.BlockSpec((rows, width), lambda o, i, *_: (i, o)),
        ),
        name="grouped_linear",
    )(group, used, x, weight)
    return products


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


def _kernel(group: Any, used: Any, x: Any, weight: Any, out: Any) -> None:
    @pl.when(pl.program_id(1) < used[0])
    def _() -> None:
        is_wide = x.dtype == jnp.float32
        matrix = weight[0]
        out[...] = jax.lax.dot_general(
            x[...],
            matrix if matrix.dtype == x.dtype else matrix.astype(x.dtype),
            (((1,), (1,)), ((), ())),
            precision=jax.lax.Precision.HIGHEST if is_wide else None,
            preferred_element_type=jnp.float32,
        )


grouped_linear = PallasGroupedLinear()
