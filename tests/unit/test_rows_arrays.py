"""Rows as device arrays: padded to what was asked for, moved and exchanged in new arrays, compiled
once for each size.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from enginebay_oengine import (
    build_allowed_mask,
    build_sampling_arrays,
    fill_slice,
    move_row,
    pack_prompts,
    swap_rows,
    swap_rows_pytree,
)

KINDS = pytest.mark.parametrize("make", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
TOKENS = np.arange(1, 13, dtype=np.int32).reshape(3, 4)
LENGTHS = np.array([2, 4, 0], np.int32)


def slow_prompts(num_rows: int, num_tokens: int, pad_id: int) -> np.ndarray:
    packed = np.full((num_rows, num_tokens), pad_id)
    for row in range(min(num_rows, 3)):
        for token in range(min(num_tokens, LENGTHS[row])):
            packed[row, token] = TOKENS[row, token]
    return packed


@KINDS
@pytest.mark.parametrize("shape", [(3, 4), (2, 3), (1, 1), (5, 4), (3, 9), (8, 16), (2, 16)])
def test_prompts_are_packed_into_more_or_fewer_rows_and_tokens(
    make, shape: tuple[int, int]
) -> None:  # holds B11
    packed = pack_prompts(make(TOKENS), make(LENGTHS), *shape, pad_id=99)
    np.testing.assert_array_equal(packed, slow_prompts(*shape, 99))
    assert packed.dtype == jnp.int32
    assert isinstance(packed, jax.Array)


def test_packing_compiles_once_for_each_size() -> None:  # holds B11
    pack_prompts(TOKENS, LENGTHS, 6, 7, 4)
    with jax.no_tracing():
        for pad_id in (5, 6):
            for lengths in (LENGTHS, LENGTHS[::-1]):
                pack_prompts(TOKENS, lengths, 6, 7, pad_id)
        with pytest.raises(RuntimeError, match="no_tracing"):
            pack_prompts(TOKENS, LENGTHS, 6, 8, 4)


def aligned_ones(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """An array that JAX's CPU device would read in place instead of copying it."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    array = raw[start : start + size].view(dtype).reshape(shape)
    array[:] = 1
    return array


def test_what_was_packed_does_not_change_with_the_table() -> None:  # holds B11
    for _ in range(5):
        table, column = aligned_ones((1024, 1024), np.int32), aligned_ones((2**20,), np.float32)
        packed = pack_prompts(table, np.full(1024, 1024), 1024, 1024, 0)
        table[:] = 7
        filled = fill_slice(column, 0.0, 2**20, 2**20)
        column[:] = 7
        assert (packed == 1).all()
        assert (filled == 1).all()


@KINDS
@pytest.mark.parametrize("padded", [2, 3, 8])
def test_sampling_arrays_are_padded_with_neutral_values(make, padded: int) -> None:  # holds B12
    columns = [[0.5, 0.0, 2.0], [0.1, 0.2, 0.3], [0.7, 0.8, 0.9], [3, 0, 5]]
    made = build_sampling_arrays(*(make(np.asarray(column)) for column in columns), 2, padded)
    for array, column, pad in zip(made, columns, (-1.0, 0.0, 1.0, 0), strict=True):
        np.testing.assert_allclose(array, column[:2] + [pad] * (padded - 2), rtol=1e-6)
    assert [array.dtype for array in made] == [jnp.float32, jnp.float32, jnp.float32, jnp.int32]


def test_sampling_arrays_run_under_jit_with_a_traced_number_of_rows() -> None:  # holds B12
    column = jnp.arange(4.0)
    traced = []

    @jax.jit
    def built(num_reqs: jax.Array) -> tuple[jax.Array, ...]:
        traced.append(num_reqs)
        return build_sampling_arrays(column, column, column, column, num_reqs, 6)

    for num_reqs in (0, 3, 4):
        temperature = built(num_reqs)[0]
        assert temperature.tolist() == [*range(num_reqs)] + [-1] * (6 - num_reqs)
    assert len(traced) == 1


@KINDS
def test_mask_is_true_for_what_is_not_allowed(make) -> None:  # holds B13
    ids = make(np.array([[0, 3, 9], [5, 5, 5], [1, 2, 4]], np.int32))
    mask = build_allowed_mask(ids, make(np.array([2, 3, 0])), vocab_size=6, max_allowed=3)
    allowed = [{0, 3}, {5}, set()]
    assert [set(np.flatnonzero(~row)) for row in np.asarray(mask)] == allowed
    assert (mask.shape, mask.dtype) == ((3, 6), jnp.bool_)
    narrower = build_allowed_mask(ids, make(np.array([3, 3, 3])), vocab_size=6, max_allowed=1)
    assert [set(np.flatnonzero(~row)) for row in np.asarray(narrower)] == [{0}, {5}, {1}]


def test_mask_runs_under_jit_and_ids_outside_the_vocabulary_allow_nothing() -> None:  # holds B13
    build = jax.jit(lambda ids, lengths: build_allowed_mask(ids, lengths, 4, 3))
    mask = np.asarray(build(jnp.array([[-1, 4, 2]]), jnp.array([3])))
    assert mask.tolist() == [[True, True, False, True]]


@KINDS
@pytest.mark.parametrize(("num_reqs", "padded"), [(2, 2), (2, 3), (3, 8), (0, 4), (0, 1)])
def test_slices_are_filled_up_to_the_size_asked_for(
    make, num_reqs: int, padded: int
) -> None:  # holds B14
    for given in (
        np.array([1.5, 2.5, 3.5], np.float32),
        np.array([[1, 2], [3, 4], [5, 6]], np.int32),
    ):
        filled = np.asarray(fill_slice(make(given), 9, num_reqs, padded))
        assert filled.shape == (padded, *given.shape[1:])
        assert filled.dtype == given.dtype
        np.testing.assert_array_equal(filled[:num_reqs], given[:num_reqs])
        assert (filled[num_reqs:] == 9).all()


def test_filling_compiles_once_for_each_size() -> None:  # holds B14
    fill_slice(np.arange(5, dtype=np.float32), 0.0, 1, 11)
    with jax.no_tracing():
        for num_reqs in range(6):
            fill_slice(np.arange(5, dtype=np.float32), 0.0, min(num_reqs, 5), 11)
        with pytest.raises(RuntimeError, match="no_tracing"):
            fill_slice(np.arange(5, dtype=np.float32), 0.0, 1, 12)


@pytest.mark.parametrize(("num_reqs", "padded"), [(4, 8), (3, 2), (-1, 4)])
def test_more_rows_than_there_are_is_an_error(num_reqs: int, padded: int) -> None:  # holds B14
    column = np.zeros(3, np.float32)
    with pytest.raises(ValueError, match=f"{num_reqs} rows to pad"):
        fill_slice(column, 0.0, num_reqs, padded)
    with pytest.raises(ValueError, match=f"{num_reqs} rows to pad"):
        build_sampling_arrays(column, column, column, column, num_reqs, padded)


@KINDS
@pytest.mark.parametrize("shape", [(4,), (4, 3), (4, 2, 2)])
def test_rows_are_moved_and_exchanged_in_new_arrays(
    make, shape: tuple[int, ...]
) -> None:  # holds B15
    original = np.arange(np.prod(shape)).reshape(shape)
    array = make(original.copy())
    moved, swapped, same = move_row(array, 3, 1), swap_rows(array, 0, 2), swap_rows(array, 1, 1)
    np.testing.assert_array_equal(moved, original[[0, 3, 2, 3]])
    np.testing.assert_array_equal(swapped, original[[2, 1, 0, 3]])
    np.testing.assert_array_equal(same, original)
    np.testing.assert_array_equal(array, original)
    for new in (moved, swapped, same):
        assert type(new) is type(array)
        assert new is not array
        assert new.dtype == array.dtype
    if isinstance(array, np.ndarray):
        assert not np.shares_memory(same, array)


@KINDS
def test_a_number_that_is_no_row_is_an_error(make) -> None:  # holds B15
    array = make(np.zeros((3, 2)))
    for wrong in (3, -1):
        for function in (move_row, swap_rows):
            with pytest.raises(IndexError, match=f"row {wrong}.*0 to 2"):
                function(array, wrong, 0)
            with pytest.raises(IndexError, match=f"row {wrong}.*0 to 2"):
                function(array, 0, wrong)


def test_rows_are_exchanged_under_jit() -> None:  # holds B15
    swap, move = jax.jit(swap_rows), jax.jit(move_row)
    assert swap(jnp.arange(4), 0, 3).tolist() == [3, 1, 2, 0]
    assert move(jnp.arange(4), 0, 3).tolist() == [0, 1, 2, 0]


def test_rows_of_a_whole_tree_are_exchanged() -> None:  # holds B15
    keys = jax.random.split(jax.random.key(0), 3)
    tree = {"host": np.arange(3), "device": (jnp.arange(6).reshape(3, 2), [keys]), "none": None}
    swapped = swap_rows_pytree(tree, 0, 2)
    assert jax.tree.structure(swapped) == jax.tree.structure(tree)
    assert isinstance(swapped["host"], np.ndarray)
    assert swapped["host"].tolist() == [2, 1, 0]
    assert swapped["device"][0].tolist() == [[4, 5], [2, 3], [0, 1]]
    wanted = jax.random.key_data(keys)[jnp.array([2, 1, 0])]
    np.testing.assert_array_equal(jax.random.key_data(swapped["device"][1][0]), wanted)
    assert tree["host"].tolist() == [0, 1, 2]
