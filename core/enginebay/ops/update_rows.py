"""Updates some rows of a batch without computing the other rows."""

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
    """Return `values`, with update(values, given) in the rows `wanted` bool [S]; all arrays of both
    trees are [S, ...].

    `update` gets some rows of both trees and returns these rows of `values`; each row must depend
    only on itself. With `rows_at_once`, `update` gets that many rows at a time, as often as the
    wanted rows need, so unwanted rows cost nothing. Without it, `update` gets all rows if one is
    wanted, and is not called if none is.
    """
    num_rows = wanted.shape[0]
    if rows_at_once is None or num_rows <= rows_at_once:

        def all_rows() -> Any:
            return jax.tree.map(
                lambda new, old: _where(wanted, new, old), update(values, given), values
            )

        return lax.cond(jnp.any(wanted), all_rows, lambda: values)
    size = rows_at_once
    first = jnp.argsort(~wanted, stable=True)  # the wanted rows first, in order
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
