"""The op lora on TPUs. Each block has tokens of one adapter, which it reads once for them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from enginebay_pallas.generations import LANES, MIB
from enginebay_pallas.interpret import interpreting

FEW, MANY = 16, 64
"""Tokens of a block: a tile of a 16-bit dtype, or more of them for prompts."""

UP_BYTES = MIB
"""Bytes of a block of b. Two blocks are in VMEM at a time."""


@dataclasses.dataclass(frozen=True)
class TokenBlocks:
    """Blocks of tokens of one adapter.

    group int32 [blocks]: the slot of each block's adapter; used int32 [1]: the number of blocks
    that have tokens, the others repeat the slot of the last one. taken int32 [blocks * block]: the
    token in each place. place int32 [T]: the place of each token; any for one without an adapter.
    """

    group: jax.Array
    used: jax.Array
    taken: jax.Array
    place: jax.Array

    @classmethod
    def of(cls, places: jax.Array, num_slots: int) -> TokenBlocks:
        """Return the blocks for places int32 [T], as LoraOp has them."""
        tokens = places.shape[0]
        block = FEW if tokens <= FEW * num_slots else MANY
        is_of_slot = places == jnp.arange(1, num_slots + 1)[:, None]
        sizes = is_of_slot.sum(axis=1, dtype=jnp.int32)
        order = jnp.argsort(jnp.where(places > 0, places, num_slots + 1), stable=True)
        starts = jnp.cumsum(sizes) - sizes
        counts = -(-sizes // block)
        last = jnp.cumsum(counts)
        number = jnp.arange(tokens // block + min(num_slots, tokens))
        number = jnp.minimum(number, jnp.maximum(last[-1] - 1, 0))
        group = jnp.minimum(jnp.searchsorted(last, number, side="right"), num_slots - 1)
        first = starts[group] + (number - (last - counts)[group]) * block
        sorted_rows = jnp.minimum(first[:, None] + jnp.arange(block), tokens - 1).reshape(-1)
        slot = jnp.maximum(places - 1, 0)
        place = (last - counts)[slot] * block + jnp.argsort(order) - starts[slot]
        ints = (group, last[-1:], order[sorted_rows], place)
        return cls(*(each.astype(jnp.int32) for each in ints))


@dataclasses.dataclass(frozen=True)
class PallasLora:
    """The op lora; LoraOp describes it. float16 is computed as f32 on TPUs."""

    is_interpreted: bool = False

    def interpreted(self) -> PallasLora:
        """Return the same kernel, run by Pallas' TPU interpreter."""
        return dataclasses.replace(self, is_interpreted=True)

    def __call__(
        self,
        y: jax.Array,
        x: jax.Array,
        a: jax.Array,
        b: jax.Array,
        places: jax.Array,
        *,
        axis: int = 0,
        ends: Sequence[int] = (),
    ) -> jax.Array:
        """Add the product of each token's adapter to y.

        y is [T, *outputs], x [T, *inputs], a [slots, parts, rank, *inputs], b [slots, rank,
        *outputs], places int32 [T]: the slot of each token, counted from 1, or 0. Part p has the
        outputs from ends[p - 1] to ends[p] of dimension `axis`; () is one part.
        """
        (tokens, *outputs), (slots, rank) = y.shape, b.shape[:2]
        if not y.size or not x.size:
            return y
        x, a, b = (
            each.astype(jnp.float32) if each.dtype == jnp.float16 else each for each in (x, a, b)
        )
        blocks = TokenBlocks.of(places, slots)
        rows = x.reshape(tokens, -1)[blocks.taken]
        down = a.reshape(*a.shape[:3], -1)
        pieces, first = [], 0
        for part, end in enumerate(ends or (outputs[axis],)):
            piece = jax.lax.slice_in_dim(y, first, end, axis=axis + 1)
            up = jax.lax.slice_in_dim(b, first, end, axis=axis + 2).reshape(slots, rank, -1)
            if up.size:
                add = functools.partial(_multiply, part)
                made = (interpreting(add) if self.is_interpreted else add)(
                    blocks.group, blocks.used, rows, down, up
                )
                added = jnp.where((places > 0)[:, None], made[blocks.place], 0.0)
                piece = (piece.astype(jnp.float32) + added.reshape(piece.shape)).astype(y.dtype)
            pieces.append(piece)
            first = end
        # Products of 0 are not added to the tokens without an adapter: -0.0 + 0.0 is 0.0.
        has_one = (places > 0).reshape(-1, *[1] * len(outputs))
        return jnp.where(has_one, jnp.concatenate(pieces, axis + 1), y)


def _multiply(
    part: int, group: jax.Array, used: jax.Array, x: jax.Array, a: jax.Array, b: jax.Array
) -> jax.Array:
    """Return the f32 products of the first `used` [1] blocks of x [blocks * rows, inputs].

    Block i is multiplied by a [slots, parts, rank, inputs] of the slot group[i] and `part`, and
    then by b [slots, rank, outputs].
    """
    (rank, inputs), outputs, blocks = a.shape[2:], b.shape[2], group.shape[0]
    rows = x.shape[0] // blocks
    width = _width(outputs, rank * b.dtype.itemsize)
    products: jax.Array = pl.pallas_call(
        _kernel,
        out_shape=jax.ShapeDtypeStruct((x.shape[0], outputs), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(blocks, outputs // width),
            in_specs=[
                pl.BlockSpec((rows, inputs), lambda i, *_: (i, 0)),
                pl.BlockSpec((1, 1, rank, inputs), lambda i, _, group, __: (group[i], part, 0, 0)),
                pl.BlockSpec((1, rank, width), lambda i, o, group, _: (group[i], 0, o)),
            ],
            out_specs=pl.BlockSpec((rows, width), lambda i, o, *_: (i, o)),
            scratch_shapes=[pltpu.VMEM((rows, rank), jnp.float32)],
        ),
        name="lora",
    )(group, used, x, a, b)
    return products


def _width(outputs: int, column_bytes: int) -> int:
    """Return the outputs of a block: whole tiles that divide all outputs, within UP_BYTES; all
    outputs where there is no such number.
    """
    fit = [
        n for n in range(LANES, outputs, LANES) if outputs % n == 0 and n * column_bytes <= UP_BYTES
    ]
    return outputs if outputs * column_bytes <= UP_BYTES else max(fit, default=outputs)


def _product(x: jax.Array, matrix: jax.Array, contracted: int) -> jax.Array:
    """Return x times a matrix whose dimension `contracted` has the size of x's last, in f32."""
    dtype = jnp.promote_types(x.dtype, matrix.dtype)
    return jax.lax.dot_general(
        x.astype(dtype),
        matrix.astype(dtype),
        (((1,), (contracted,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def _kernel(group: Any, used: Any, x: Any, a: Any, b: Any, out: Any, shrunk: Any) -> None:
    @pl.when(pl.program_id(0) < used[0])
    def _() -> None:
        @pl.when(pl.program_id(1) == 0)
        def _() -> None:
            shrunk[...] = _product(x[...], a[0, 0], 1)

        out[...] = _product(shrunk[...].astype(x.dtype), b[0], 0)


lora = PallasLora()
