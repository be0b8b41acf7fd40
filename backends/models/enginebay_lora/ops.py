"""The op lora: its signature, its record, its reference and its cost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.ops.op import Op
from enginebay_bench.cost import Cost


class LoraOp(Protocol):
    """Adds the product of each token's adapter to the result of a linear layer.

    y is [T, *outputs], x [T, *inputs], a [slots, parts, rank, *inputs], b [slots, rank, *outputs],
    places int32 [T]. The outputs are those of one or several parts, such as q, k and v: part i has
    the outputs from ends[i - 1] to ends[i] of dimension `axis` of `outputs`, and () is one part. A
    token with place p > 0 belongs to the adapter in slot p - 1; an output of part i is
    y + (x a[p - 1, i]) b[p - 1]. The result of a token with place 0 is y. Rows are independent.
    Sums are f32; x a is rounded to x's dtype, and the result to y's dtype. All numbers in a and b
    are finite. The factor of an adapter is part of its b. y may be overwritten.
    """

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
    ) -> jax.Array: ...


LORA: Op[LoraOp] = Op(
    "lora",
    LoraOp,
    "enginebay_lora.ops:lora_reference",
    "enginebay_lora.kit:lora_quick_cases",
    {"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3},
    kit="enginebay_lora.kit:LORA_KIT",
    bench="enginebay_lora.bench:LORA_BENCH",
    cost="enginebay_lora.ops:lora_cost",
    oracle="enginebay_lora.ops:lora_oracle",
    partition="enginebay_lora.partition:lora_partition",
    adapters="enginebay_lora.planning:with_adapters",
)


def part_slices(
    outputs: Sequence[int], axis: int, ends: Sequence[int]
) -> Iterator[tuple[int, tuple[slice, ...]]]:
    """Yield each part's number, and the index of its outputs in an array [*outputs]."""
    first = 0
    for number, end in enumerate(ends or (outputs[axis],)):
        yield number, (*(slice(None),) * axis, slice(first, end))
        first = end


def lora_reference(
    y: jax.Array,
    x: jax.Array,
    a: jax.Array,
    b: jax.Array,
    places: jax.Array,
    *,
    axis: int = 0,
    ends: Sequence[int] = (),
) -> jax.Array:
    """Multiply every token with every adapter, and keep the product of its own; slow."""
    num_slots, parts, rank = a.shape[:3]
    highest = jax.lax.Precision.HIGHEST
    rows = x.reshape(len(x), -1).astype(jnp.float32)
    down = a.reshape(num_slots, parts, rank, -1).astype(jnp.float32)
    shrunk = jnp.einsum("ti,spri->tspr", rows, down, precision=highest)
    is_mine = places[:, None] == jnp.arange(1, num_slots + 1)
    shrunk = jnp.where(is_mine[..., None, None], shrunk, 0).astype(x.dtype).astype(jnp.float32)
    out = y.astype(jnp.float32)
    for part, where in part_slices(y.shape[1:], axis, ends):
        up = b[(slice(None), slice(None), *where)].astype(jnp.float32)
        out = out.at[(slice(None), *where)].add(
            jnp.einsum("tsr,sr...->t...", shrunk[:, :, part], up, precision=highest)
        )
    return out.astype(y.dtype)


def lora_oracle(
    y: np.ndarray,
    x: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    places: np.ndarray,
    *,
    axis: int = 0,
    ends: Sequence[int] = (),
) -> np.ndarray:
    """Compute the op token by token in float64."""
    out = y.astype(np.float64)
    for token, place in enumerate(places):
        if place > 0:
            row = x[token].astype(np.float64).reshape(-1)
            for part, where in part_slices(y.shape[1:], axis, ends):
                down = a[place - 1, part].astype(np.float64).reshape(-1, row.size)
                up = b[(place - 1, slice(None), *where)].astype(np.float64)
                out[token][where] += np.tensordot(down @ row, up, 1)
    return out


def lora_cost(
    y: Any,
    x: Any,
    a: Any,
    b: Any,
    places: Any,
    *,
    axis: int = 0,
    ends: Sequence[int] = (),
) -> Cost:
    """Return the cost with each adapter that has tokens read once.

    If only shapes are known, as many adapters as possible have tokens.
    """
    tokens, used = x.shape[0], min(x.shape[0], a.shape[0])
    if not isinstance(places, jax.ShapeDtypeStruct):
        tokens, used = int((places > 0).sum()), len(np.unique(places[places > 0]))
    sizes = [math.prod(each.shape[1:]) * each.dtype.itemsize for each in (a, b)]
    flops = 2.0 * tokens * (math.prod(a.shape[1:]) + math.prod(b.shape[1:]))
    result = 1.0 * math.prod(y.shape) * y.dtype.itemsize
    read = result + math.prod(x.shape) * x.dtype.itemsize + 4.0 * x.shape[0] + used * sum(sizes)
    return Cost(flops, read, result)
