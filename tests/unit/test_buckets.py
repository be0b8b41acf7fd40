"""Sizes of steps: few, and not much larger than what they hold."""

from __future__ import annotations

import pytest

from enginebay.runner.buckets import finer, round_up


@pytest.mark.parametrize("most", [1, 2, 7, 8, 20, 32, 100, 256])
def test_rows_of_ragged_steps_are_few_and_at_most_a_third_of_them_is_padding(most: int) -> None:
    sizes = finer(1, most)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == most
    assert len(sizes) <= 14
    for rows in range(8, most + 1):
        assert round_up(sizes, rows) - rows <= round_up(sizes, rows) / 3
