"""Some rows of a batch are computed, a few at a time or all together, and the others stay as they
are.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginebay.ops.update_rows import update_rows

NUM_ROWS = 7


def _update(values: Any, of: Any) -> Any:
    """Of each row by itself: the table's rows times the factor plus their own sum, and a
    counter.
    """
    table, count = values
    return table * of["factor"][:, None] + table.sum(axis=1, keepdims=True), count + 1


def _program(rows_at_once: int | None) -> Any:
    return jax.jit(
        lambda wanted, values, of: update_rows(
            wanted, _update, values, of, rows_at_once=rows_at_once
        )
    )


PROGRAMS = {rows: _program(rows) for rows in (None, 1, 2, 3, NUM_ROWS, 50)}


@settings(max_examples=25, deadline=None, derandomize=True)
@given(wanted=st.lists(st.booleans(), min_size=NUM_ROWS, max_size=NUM_ROWS), seed=st.integers(0, 9))
@pytest.mark.parametrize("rows_at_once", PROGRAMS)
def test_rows_that_are_wanted_change_and_no_others(
    rows_at_once: int | None, wanted: list[bool], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    table, factor = rng.integers(-9, 9, (NUM_ROWS, 5)), rng.integers(-9, 9, NUM_ROWS)
    count = np.arange(NUM_ROWS)
    got = PROGRAMS[rows_at_once](np.array(wanted), (table, count), {"factor": factor})
    changed = table * factor[:, None] + table.sum(axis=1, keepdims=True)
    np.testing.assert_array_equal(got[0], np.where(np.array(wanted)[:, None], changed, table))
    np.testing.assert_array_equal(got[1], count + np.array(wanted))


@pytest.mark.parametrize(("num_wanted", "turns"), [(0, 0), (1, 1), (2, 1), (3, 2), (7, 4)])
def test_what_is_computed_is_what_the_wanted_rows_need(num_wanted: int, turns: int) -> None:
    called: list[int] = []

    def update(values: jax.Array, of: Any) -> jax.Array:
        del of
        jax.debug.callback(lambda rows: called.append(len(rows)), values)
        return values + 1

    wanted = np.arange(NUM_ROWS) >= NUM_ROWS - num_wanted
    zeros = np.zeros(NUM_ROWS, np.float32)
    after = jax.jit(lambda w, values: update_rows(w, update, values, (), rows_at_once=2))(
        wanted, zeros
    )
    jax.effects_barrier()
    assert called == [2] * turns
    np.testing.assert_array_equal(after, np.asarray(wanted, np.float32))
