"""Computing for some of a batch's rows: what the others would cost is left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def update_rows(
    wanted: jax.Array,
    update: Callable[[Any, Any], Any],
    values: Any,
    given: Any,
    *,
    rows_at_once: int | None = None,
) -> Any:
    """`values` with update(values, given) in the rows `wanted` bool [S]; all arrays of both trees
    are [S, ...].

    `update` is called with some rows of both, and gives these rows of `values`, each of which must
    depend on itself alone. With `rows_at_once` it gets so many at a time, as often as it takes for
    the rows that are wanted: what it costs is what they cost. Without, it gets all when one is
    wanted, and nothing is computed when none is.
    """
    num_rows = wanted.shape[0]
    if rows_at_once is None or num_rows <= rows_at_once:

        def all_rows() -> Any:
            return jax.tree.map(
                lambda new, old: _where(wanted, new, old), update(values, given), values
            )

        return lax.cond(jnp.any(wanted), all_rows, lambda: values)
    size = rows_at_once
    first = jnp.argsort(~wanted, stable=True)  # those that are wanted, in their order
    rows = jnp.where(jnp.arange(num_rows) < wanted.sum(), first, num_rows)
    rows = jnp.pad(rows, (0, -num_rows % size), constant_values=num_rows)

    def some_rows(turn: jax.Array, values: Any) -> Any:
        ids = lax.dynamic_slice(rows, (turn * size,), (size,))
        part = jax.tree.map(lambda array: array.at[ids].get(mode="clip"), (values, given))
        return jax.tree.map(
            lambda array, new: array.at[ids].set(new, mode="drop"), values, update(*part)
        )

    return lax.fori_loop(0, -(-wanted.sum() // size), some_rows, values)


def _where(wanted: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    return jnp.where(wanted.reshape(-1, *(1,) * (new.ndim - 1)), new, old)
