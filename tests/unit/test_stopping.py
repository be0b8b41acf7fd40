"""Stop sequences are found where they first end, and what may become one is held back, however the
stream is cut.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginebay.text.stopping import (
    SequenceChecker,
    end_of_match,
    length_of_beginning,
    length_of_match,
)

FEW = st.integers(0, 2)
OUTPUTS = st.lists(FEW, max_size=14)
SEQUENCES = st.lists(st.lists(FEW, min_size=1, max_size=4), max_size=3)


def first_end(output: list[int], sequences: list[list[int]]) -> int | None:
    """By the definition: the shortest beginning of the output that ends with a sequence."""
    return next(
        (
            end
            for end in range(len(output) + 1)
            if any(output[:end][-len(one) :] == one and end >= len(one) for one in sequences)
        ),
        None,
    )


@given(OUTPUTS, SEQUENCES, st.data())
def test_the_first_end_is_found_wherever_the_output_is_cut(
    output: list[int], sequences: list[list[int]], data: st.DataObject
) -> None:  # holds G104
    expected = first_end(output, sequences)
    assert end_of_match(output, sequences) == expected
    cut = data.draw(st.integers(0, len(output)))
    found = end_of_match(output[:cut], sequences)
    found = end_of_match(output, sequences, cut) if found is None else found
    assert found == expected


@given(OUTPUTS, SEQUENCES)
def test_tokens_are_given_until_a_sequence_and_never_one_of_it(
    output: list[int], sequences: list[list[int]]
) -> None:  # holds G104
    checker = SequenceChecker(sequences)
    given_out: list[int] = []
    seen = 0
    for token_id in output:
        seen += 1
        given_out += checker.push(token_id)
        if checker.stopped:
            break
        held = seen - len(given_out)
        assert given_out == output[: seen - held]
        assert held == length_of_beginning(output[:seen], sequences)
    end = first_end(output, sequences)
    assert checker.stopped == (end is not None)
    if end is None:
        assert given_out + checker.flush() == output
    else:
        assert seen == end
        assert given_out == output[: end - length_of_match(output[:end], sequences)]
        assert checker.flush() == []


@pytest.mark.parametrize(
    ("output", "sequences", "length"),
    [([1, 2, 3], [[2, 3], [3]], 2), ([1, 2, 3], [[1, 2]], 0), ([], [[1]], 0), ([3], [[2, 3]], 0)],
)
def test_of_several_that_end_together_the_longest_counts(
    output: list[int], sequences: list[list[int]], length: int
) -> None:  # holds G104
    assert length_of_match(output, sequences) == length


@given(OUTPUTS, SEQUENCES, st.integers(0, 6))
def test_what_ends_early_does_not_count(
    output: list[int], sequences: list[list[int]], least: int
) -> None:
    """The loop and the reader agree on where a completion ends, which is behind the first `least`
    tokens.
    """
    end = end_of_match(output, sequences, least)
    ends = [e for e in range(least + 1, len(output) + 1) if length_of_match(output[:e], sequences)]
    assert end == min(ends, default=None)
    checker = SequenceChecker(sequences, least)
    given_out: list[int] = []
    for number, token_id in enumerate(output, 1):
        given_out += checker.push(token_id)
        if checker.stopped:
            assert number == end
            break
    else:
        assert end is None
        assert given_out + checker.flush() == output


def test_an_end_that_no_sequence_begins_with_is_not_held_back() -> None:
    assert length_of_beginning([7, 8], [(1, 2, 3)]) == 0
    assert length_of_beginning([7, 1], [(1, 2, 3)]) == 1
    assert length_of_beginning([1, 2], [(1, 2), (1, 2, 3)]) == 2
