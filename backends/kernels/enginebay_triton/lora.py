"""The op lora in Triton. Each block has tokens of one adapter, and reads only this adapter."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay_triton.call import Launch, Launcher, launch, require_versions
from enginebay_triton.interpreter import interpret, require

require_versions()

from enginebay_triton.lora_kernels import (  # noqa: E402  # needs Triton
    lora_expand_kernel,
    lora_shrink_kernel,
)

FEW, MANY = 16, 64
"""Tokens of a block: the smallest product of tensor cores, and a size for prompts."""

WIDTH, DEPTH = 64, 64
"""Outputs or ranks of a program, and inputs or ranks per iteration, at most."""


@dataclasses.dataclass(frozen=True)
class Lora:
    """The op lora; LoraOp describes it."""

    launcher: Launcher = launch

    def interpreted(self) -> Lora:
        """Return the same op in Triton's interpreter; raises UnsupportedError without Triton."""
        require()
        return dataclasses.replace(self, launcher=interpret)

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
        """Add the product of each token's adapter to y, in place where y is not used afterwards.

        y is [T, *outputs], x [T, *inputs], a [slots, parts, rank, *inputs], b [slots, rank,
        *outputs], places int32 [T]: the slot of each token, counted from 1, or 0. Part p has the
        outputs from ends[p - 1] to ends[p] of dimension `axis`; () is one part.
        """
        (tokens, *outputs), (slots, parts, rank) = y.shape, a.shape[:3]
        if not y.size or not x.size:
            return y
        rows = FEW if tokens <= FEW * slots else MANY
        group, first, end, token = adapter_blocks(places, slots, rows)
        x = x.reshape(tokens, -1).astype(jnp.promote_types(x.dtype, a.dtype))
        narrow = min(WIDTH, max(16, 1 << (rank - 1).bit_length()))
        constants: dict[str, Any] = {
            "PARTS": parts,
            "RANK": rank,
            "ROWS": rows,
            "PRECISION": "ieee" if x.dtype == jnp.float32 else "tf32",
        }
        numbers = [group, first, end, token]
        shrink = Launch(
            (group.shape[0], parts, -(-rank // narrow)),
            (jax.ShapeDtypeStruct((tokens, parts, rank), x.dtype),),
            {"INPUTS": x.shape[1], **constants, "WIDTH": narrow, "DEPTH": DEPTH},
            num_stages=4,
        )
        (shrunk,) = self.launcher(lora_shrink_kernel, [x, a.reshape(-1), *numbers], shrink)
        runs = runs_of(outputs, axis, ends)
        flat = math.prod(outputs)
        expand = Launch(
            (group.shape[0], len(runs)),
            (),
            {"OUTPUTS": flat, **constants, "WIDTH": WIDTH, "DEPTH": narrow},
            num_in_place=1,
        )
        read = [shrunk, b.reshape(-1), *numbers, jnp.asarray(runs)]
        (added,) = self.launcher(lora_expand_kernel, [*read, y.reshape(tokens, flat)], expand)
        return added.reshape(y.shape)


def adapter_blocks(
    places: jax.Array, num_slots: int, rows: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return int32 arrays: (slot, first place, end of places) of each block of at most `rows`
    tokens of one adapter, and the token in each place. Tokens without an adapter are in no block.
    """
    tokens = places.shape[0]
    order = jnp.argsort(jnp.where(places > 0, places, num_slots + 1), stable=True)
    sizes = (places == jnp.arange(1, num_slots + 1)[:, None]).sum(axis=1, dtype=jnp.int32)
    counts, ends = -(-sizes // rows), jnp.cumsum(sizes)
    last = jnp.cumsum(counts)
    number = jnp.arange(tokens // rows + min(num_slots, tokens))
    group = jnp.minimum(jnp.searchsorted(last, number, side="right"), num_slots - 1)
    first = ends[group] - sizes[group] + (number - (last - counts)[group]) * rows
    found = (group, first, ends[group], order)
    group, first, end, order = (each.astype(jnp.int32) for each in found)
    return group, first, end, order


def runs_of(outputs: Sequence[int], axis: int, ends: Sequence[int]) -> np.ndarray:
    """Return int32 [runs, 3]: the first of the flattened outputs, the end, and the part of each run
    of at most WIDTH outputs of one part.
    """
    inner = math.prod(outputs[axis + 1 :])
    period, runs = outputs[axis] * inner, []
    for start in range(0, math.prod(outputs), period):
        first = start
        for part, bound in enumerate(ends or (outputs[axis],)):
            end = start + bound * inner
            runs += [(at, min(at + WIDTH, end), part) for at in range(first, end, WIDTH)]
            first = end
    return np.array(runs, np.int32).reshape(-1, 3)


lora = Lora()
