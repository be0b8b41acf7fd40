"""The op lora in plain JAX."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from enginebay_lora.ops import part_slices

MAX_DENSE_TOKENS = 128
"""The most tokens that are multiplied with all adapters in one product. For more tokens, one
product for each adapter that has tokens costs less.
"""


def lora(
    y: jax.Array,
    x: jax.Array,
    a: jax.Array,
    b: jax.Array,
    places: jax.Array,
    *,
    axis: int = 0,
    ends: Sequence[int] = (),
) -> jax.Array:
    """Add the product of each token's adapter to y; LoraOp describes the arguments.

    Nothing is multiplied when no token has an adapter. Fewer tokens than slots: each token reads
    its own adapter. Up to MAX_DENSE_TOKENS: the adapters of all slots are one matrix, and the
    shrunk values of other adapters are set to 0. More tokens: one product for each adapter.
    """
    (slots, rank), tokens = b.shape[:2], x.shape[0]
    if not tokens:
        return y
    rows = x.reshape(tokens, -1)
    add = _of_own if tokens < slots else _of_all if tokens <= MAX_DENSE_TOKENS else _of_each

    def added() -> jax.Array:
        pieces = []
        for part, where in part_slices(y.shape[1:], axis, ends):
            base = y[(slice(None), *where)]
            down = a[:, part].reshape(slots, rank, -1)
            up = b[(slice(None), slice(None), *where)].reshape(slots, rank, -1)
            out = add(base.reshape(tokens, -1).astype(jnp.float32), rows, down, up, places)
            pieces.append(out.reshape(base.shape).astype(y.dtype))
        return jnp.concatenate(pieces, axis + 1)

    out: jax.Array = jax.lax.cond((places > 0).any(), added, lambda: y)
    return out


def _product(x: jax.Array, matrix: jax.Array, contracted: int) -> jax.Array:
    """Return x [T, n] times a matrix whose dimension `contracted` has size n, in f32."""
    # full f32 on every platform, because other implementations are compared with it
    precision = jax.lax.Precision.HIGHEST if x.dtype == matrix.dtype == jnp.float32 else None
    numbers = (((1,), (contracted,)), ((), ()))
    return jax.lax.dot_general(
        x, matrix, numbers, precision=precision, preferred_element_type=jnp.float32
    )


def _of_all(
    base: jax.Array, x: jax.Array, down: jax.Array, up: jax.Array, places: jax.Array
) -> jax.Array:
    """One product with the adapters of all slots; base and the result are f32 [T, outputs]."""
    slots, rank, _ = down.shape
    shrunk = _product(x, down.reshape(slots * rank, -1), 1)
    owner = jnp.arange(slots * rank, dtype=jnp.int32) // rank + 1
    shrunk = jnp.where(places[:, None] == owner, shrunk, 0).astype(x.dtype)
    return base + _product(shrunk, up.reshape(slots * rank, -1), 0)


def _of_each(
    base: jax.Array, x: jax.Array, down: jax.Array, up: jax.Array, places: jax.Array
) -> jax.Array:
    """One product for each slot whose adapter has tokens."""

    def of_slot(slot: jax.Array, out: jax.Array) -> jax.Array:
        is_mine = places == slot + 1

        def add() -> jax.Array:
            shrunk = jnp.where(is_mine[:, None], _product(x, down[slot], 1), 0)
            return out + _product(shrunk.astype(x.dtype), up[slot], 0)

        return jax.lax.cond(is_mine.any(), add, lambda: out)

    return jax.lax.fori_loop(0, down.shape[0], of_slot, base)


def _of_own(
    base: jax.Array, x: jax.Array, down: jax.Array, up: jax.Array, places: jax.Array
) -> jax.Array:
    """Each token reads its own adapter."""
    slot, precision = jnp.maximum(places - 1, 0), None
    if x.dtype == down.dtype == jnp.float32:
        precision = jax.lax.Precision.HIGHEST
    shrunk = jnp.einsum(
        "ti,tri->tr", x, down[slot], precision=precision, preferred_element_type=jnp.float32
    )
    shrunk = jnp.where((places > 0)[:, None], shrunk, 0).astype(x.dtype)
    return base + jnp.einsum(
        "tr,tro->to", shrunk, up[slot], precision=precision, preferred_element_type=jnp.float32
    )
