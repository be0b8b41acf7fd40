"""The op lora: its signature, its record, its reference and its cost."""

from __future__ import annotations

import math
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.ops.op import Op
from enginebay_bench.cost import Cost


class LoraOp(Protocol):
    """Adds the product of each token's adapter to the result of a linear layer.

    y is [T, *outputs], x [T, *inputs], a [slots, rank, *inputs], b [slots, rank, *outputs], places
    int32 [T]. A token with place p > 0 belongs to the adapter in slot p - 1; its result is
    y + (x a[p - 1]) b[p - 1]. The result of a token with place 0 is y. Rows are independent. Sums
    are f32; x a is rounded to x's dtype, and the result to y's dtype. All numbers in a and b are
    finite. The factor of an adapter is part of its b.
    """

    def __call__(
        self, y: jax.Array, x: jax.Array, a: jax.Array, b: jax.Array, places: jax.Array
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
)


def lora_reference(
    y: jax.Array, x: jax.Array, a: jax.Array, b: jax.Array, places: jax.Array
) -> jax.Array:
    """Multiply every token with every adapter, and keep the product of its own; slow."""
    num_slots, rank = a.shape[:2]
    highest = jax.lax.Precision.HIGHEST
    rows = x.reshape(len(x), -1).astype(jnp.float32)
    down = a.reshape(num_slots, rank, -1).astype(jnp.float32)
    shrunk = jnp.einsum("ti,sri->tsr", rows, down, precision=highest)
    is_mine = places[:, None] == jnp.arange(1, num_slots + 1)
    shrunk = jnp.where(is_mine[..., None], shrunk, 0).astype(x.dtype).astype(jnp.float32)
    up = b.reshape(num_slots, rank, -1).astype(jnp.float32)
    added = jnp.einsum("tsr,sro->to", shrunk, up, precision=highest).reshape(y.shape)
    return (y.astype(jnp.float32) + added).astype(y.dtype)


def lora_oracle(
    y: np.ndarray, x: np.ndarray, a: np.ndarray, b: np.ndarray, places: np.ndarray
) -> np.ndarray:
    """Compute the op token by token in float64."""
    out = y.astype(np.float64)
    for token, place in enumerate(places):
        if place > 0:
            down, up = (each[place - 1].astype(np.float64) for each in (a, b))
            shrunk = down.reshape(len(down), -1) @ x[token].astype(np.float64).reshape(-1)
            out[token] += (shrunk @ up.reshape(len(up), -1)).reshape(out[token].shape)
    return out


def lora_cost(y: Any, x: Any, a: Any, b: Any, places: Any) -> Cost:
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
