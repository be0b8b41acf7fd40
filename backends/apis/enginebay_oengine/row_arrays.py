"""Rows of the table as device arrays: padded to the size of a bucket, moved and swapped.

Padded sizes are static, so there is one program for each bucket; counts and values are traced.
NumPy arguments are copied first, because the table changes them later.
"""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.errors import InputError, explain

Arr = TypeVar("Arr", np.ndarray, jax.Array)


def pack_prompts(
    token_ids: np.ndarray | jax.Array,
    num_prompt_tokens: np.ndarray | jax.Array,
    padded_num_reqs: int,
    padded_prompt_len: int,
    pad_id: int,
) -> jax.Array:
    """Return `token_ids` [rows, tokens] as an array [padded_num_reqs, padded_prompt_len], in which
    every place after the end of a prompt has pad_id.

    Additional rows and columns have pad_id too. Only the rows and columns that the result has are
    copied to the device.
    """
    token_ids = _snapshot(token_ids[:padded_num_reqs, :padded_prompt_len])
    lengths = _snapshot(num_prompt_tokens[:padded_num_reqs])
    return _pack(token_ids, lengths, pad_id, padded_num_reqs, padded_prompt_len)


def fill_slice(
    arr: np.ndarray | jax.Array, fill_val: float, num_reqs: int, padded_num_reqs: int
) -> jax.Array:
    """Return the first num_reqs rows of `arr`, followed by rows of fill_val: [padded_num_reqs,
    ...], same dtype.

    InputError for more rows than `arr` or the result has.
    """
    _check_num_reqs(num_reqs, min(len(arr), padded_num_reqs))
    return _fill_jit(_snapshot(arr[:padded_num_reqs]), fill_val, num_reqs, padded_num_reqs)


def build_sampling_arrays(
    temperature: np.ndarray | jax.Array,
    min_p: np.ndarray | jax.Array,
    top_p: np.ndarray | jax.Array,
    top_k: np.ndarray | jax.Array,
    num_reqs: int,
    padded_num_reqs: int,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return temperature, min_p, top_p (f32) and top_k (i32), each [padded_num_reqs]; padding is
    -1, 0, 1 and 0.

    InputError for more rows than the arrays or the results have.
    """
    given = (temperature, min_p, top_p, top_k)
    _check_num_reqs(num_reqs, min(padded_num_reqs, *map(len, given)))
    cut = [_snapshot(column[:padded_num_reqs]) for column in given]
    return _build_sampling(*cut, num_reqs, padded_num_reqs)


def build_allowed_mask(
    allowed_ids_padded: np.ndarray | jax.Array,
    allowed_lens: np.ndarray | jax.Array,
    vocab_size: int,
    max_allowed: int,
) -> jax.Array:
    """Return a mask bool [rows, vocab_size], True for tokens that are NOT allowed: all except the
    first allowed_lens ids of each row.

    `allowed_ids_padded` is [rows, max_allowed]. Ids outside the vocabulary are ignored.
    """
    return _allowed_mask(
        _snapshot(allowed_ids_padded), _snapshot(allowed_lens), vocab_size, max_allowed
    )


def move_row(arr: Arr, from_idx: int, to_idx: int) -> Arr:
    """Return a copy of the array with row from_idx copied to to_idx; NumPy for NumPy. IndexError
    for an index out of range.
    """
    _check_rows(len(arr), from_idx, to_idx)
    if isinstance(arr, jax.Array):
        return _put_rows(arr, jnp.asarray([to_idx]), jnp.asarray([from_idx]))
    moved = arr.copy()
    moved[to_idx] = arr[from_idx]
    return moved


def swap_rows(arr: Arr, i1: int, i2: int) -> Arr:
    """Return a copy of the array with rows i1 and i2 swapped; NumPy for NumPy. IndexError for an
    index out of range.
    """
    _check_rows(len(arr), i1, i2)
    if isinstance(arr, jax.Array):
        return _put_rows(arr, jnp.asarray([i1, i2]), jnp.asarray([i2, i1]))
    swapped = arr.copy()
    swapped[[i1, i2]] = arr[[i2, i1]]
    return swapped


def swap_rows_pytree(arrs: Any, i1: int, i2: int) -> Any:
    """Return a tree like `arrs` with rows i1 and i2 of each array swapped."""
    return jax.tree.map(lambda arr: swap_rows(arr, i1, i2), arrs)


@functools.partial(jax.jit, static_argnums=(3, 4))
def _pack(
    token_ids: jax.Array, lengths: jax.Array, pad_id: int, num_rows: int, num_tokens: int
) -> jax.Array:
    inside = jnp.arange(token_ids.shape[1]) < lengths[:, None]
    pad = jnp.asarray(pad_id, token_ids.dtype)
    rows, tokens = token_ids.shape
    packed = jnp.full((num_rows, num_tokens), pad)
    return packed.at[:rows, :tokens].set(jnp.where(inside, token_ids, pad))


def _fill(arr: jax.Array, fill_val: float, num_reqs: int, padded_num_reqs: int) -> jax.Array:
    fill = jnp.asarray(fill_val, arr.dtype)
    padded = jnp.full((padded_num_reqs, *arr.shape[1:]), fill).at[: len(arr)].set(arr)
    is_request = (jnp.arange(padded_num_reqs) < num_reqs).reshape(-1, *(1 for _ in arr.shape[1:]))
    return jnp.where(is_request, padded, fill)


_fill_jit = functools.partial(jax.jit, static_argnums=3)(_fill)


@functools.partial(jax.jit, static_argnums=5)
def _build_sampling(
    temperature: jax.Array,
    min_p: jax.Array,
    top_p: jax.Array,
    top_k: jax.Array,
    num_reqs: int,
    padded_num_reqs: int,
) -> tuple[jax.Array, ...]:
    f32, i32 = jnp.float32, jnp.int32
    columns = (
        (temperature, f32, -1.0),
        (min_p, f32, 0.0),
        (top_p, f32, 1.0),
        (top_k, i32, 0),
    )
    return tuple(
        _fill(c.astype(dtype), fill, num_reqs, padded_num_reqs) for c, dtype, fill in columns
    )


@functools.partial(jax.jit, static_argnums=(2, 3))
def _allowed_mask(
    ids: jax.Array, lengths: jax.Array, vocab_size: int, max_allowed: int
) -> jax.Array:
    ids = ids[:, :max_allowed]
    is_id = (jnp.arange(ids.shape[1]) < lengths[:, None]) & (ids >= 0)
    rows = jnp.arange(len(ids))[:, None]
    disallowed = jnp.ones((len(ids), vocab_size), bool)
    return disallowed.at[rows, jnp.where(is_id, ids, vocab_size)].set(False, mode="drop")


@jax.jit
def _put_rows(arr: jax.Array, to: jax.Array, source: jax.Array) -> jax.Array:
    return arr.at[to].set(arr[source])


def _snapshot(array: np.ndarray | jax.Array) -> Any:
    """Return a JAX array unchanged, because it is immutable, and a copy of any other array."""
    return array if isinstance(array, jax.Array) else np.array(array)


def _check_num_reqs(num_reqs: int, most: int) -> None:
    if isinstance(num_reqs, int | np.integer) and not 0 <= num_reqs <= most:
        raise InputError(
            f"{num_reqs} rows to pad",
            f"0 to {most}, the rows of the arrays",
            "Raise padded_num_reqs, or lower num_reqs.",
        )


def _check_rows(num_rows: int, *rows: int) -> None:
    """Raise IndexError for wrong indices; traced indices are not checked."""
    for row in rows:
        if isinstance(row, int | np.integer) and not 0 <= row < num_rows:
            raise IndexError(explain(f"row {row}", f"0 to {num_rows - 1}", "Rows count from 0."))
