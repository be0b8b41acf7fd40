"""The row table keeps its requests, whatever the order of operations; free rows hold initial values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginebay.rows import SequenceBuffer
from enginebay.types import MAX_STOP_TOKENS, FrozenSampling, Request

ROWS, LENGTH = 5, 12


def make_request(name: str, prompt: list[int], number: int = 0) -> Request:
    sampling = FrozenSampling(
        4,
        0.25 * number,
        number,
        1.0 - number / 16,
        number / 32,
        (),
        tuple(range(number % 4)),
        include_stop_str_in_output=False,
        skip_special_tokens=True,
        presence_penalty=number / 8,
        frequency_penalty=-number / 8,
        repetition_penalty=1.0 + number / 4,
    )
    return Request(
        name, np.asarray(prompt, np.int32), sampling, key=(number, 2**32 - 1 - number), arrival_s=0.0
    )


def make_table() -> SequenceBuffer:
    return SequenceBuffer(
        max_num_reqs=ROWS, max_model_len=LENGTH, max_num_batched_tokens=64, vocab_size=100, page_sizes=[4]
    )


def penalties(table: SequenceBuffer, row: int) -> tuple[float, float, float]:
    return (table.frequency_penalties[row], table.presence_penalties[row], table.repetition_penalties[row])


def assert_row_is_free(table: SequenceBuffer, row: int) -> None:
    assert not table.token_ids[row].any()
    assert (table.num_tokens[row], table.num_prompt_tokens[row], table.num_computed_tokens[row]) == (0, 0, 0)
    assert (table.temperature[row], table.top_p[row], table.min_p[row], table.top_k[row]) == (
        0.0,
        1.0,
        0.0,
        0,
    )
    assert penalties(table, row) == (0.0, 0.0, 1.0)
    assert (table.stop_token_ids[row] == -1).all()
    assert not table.keys[row].any()


def assert_row_holds(table: SequenceBuffer, row: int, request: Request, output: list[int]) -> None:
    tokens = [*request.prompt_token_ids[:LENGTH], *output]
    assert table.request(row) is request
    assert table.token_ids[row].tolist() == tokens + [0] * (LENGTH - len(tokens))
    assert (table.num_tokens[row], table.num_prompt_tokens[row]) == (len(tokens), len(tokens) - len(output))
    sampling = request.sampling
    got = (table.temperature[row], table.top_p[row], table.min_p[row], table.top_k[row])
    assert got == (sampling.temperature, sampling.top_p, sampling.min_p, sampling.top_k)
    wanted = (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty)
    assert penalties(table, row) == wanted
    stops = list(sampling.stop_token_ids)
    assert table.stop_token_ids[row].tolist() == stops + [-1] * (MAX_STOP_TOKENS - len(stops))
    assert tuple(table.keys[row].tolist()) == request.key


def test_lowest_free_row_is_taken_first() -> None:
    table = make_table()
    for name in "abcd":
        table.add_request(make_request(name, [1]))
    assert table.remove_request("c") == 2
    assert table.remove_request("a") == 0
    table.add_request(make_request("e", [2, 3]))
    assert table.row_of("e") == 0
    assert table.req_ids == ["e", "b", "d"]
    assert table.row_of("a") is None


def test_wrong_additions_are_refused_and_change_nothing() -> None:  # holds B03
    table = make_table()
    table.add_request(make_request("a", [1]), req_index=3)
    with pytest.raises(ValueError, match=r"request id 'a'.*row 3"):
        table.add_request(make_request("a", [1]))
    with pytest.raises(ValueError, match="row 3, which is taken"):
        table.add_request(make_request("b", [1]), req_index=3)
    for index in (ROWS, -1):
        with pytest.raises(IndexError, match=f"row {index}.*0 to {ROWS - 1}"):
            table.add_request(make_request("b", [1]), req_index=index)
    for name in "cdef":
        table.add_request(make_request(name, [1]))
    with pytest.raises(RuntimeError, match="rows are taken"):
        table.add_request(make_request("g", [1]))
    assert table.num_reqs == ROWS
    assert table.req_ids == ["c", "d", "e", "a", "f"]


def test_long_prompt_is_cut_and_too_many_tokens_are_refused() -> None:
    table = make_table()
    table.add_request(make_request("a", list(range(1, LENGTH + 5))))
    assert table.num_prompt_tokens[0] == LENGTH
    with pytest.raises(ValueError, match="1 tokens after the 12"):
        table.append_tokens(0, [1])
    with pytest.raises(AssertionError, match="row 1 is free"):
        table.append_tokens(1, [1])


def test_removing_clears_every_column_and_an_unknown_id_is_none() -> None:  # holds B04
    table = make_table()
    table.add_request(make_request("a", [1, 2], number=7))
    table.append_tokens(0, [5])
    table.num_computed_tokens[0] = 3
    assert table.remove_request("b") is None
    assert table.remove_request("a") == 0
    assert_row_is_free(table, 0)


def test_swapping_needs_two_taken_rows() -> None:  # holds B06
    table = make_table()
    table.add_request(make_request("a", [1, 2], number=3))
    for pair in ((0, 1), (1, 0), (1, 1)):
        with pytest.raises(AssertionError, match="row 1 is free"):
            table.swap_states(*pair)
    table.swap_states(0, 0)
    assert_row_holds(table, 0, table.request(0), [])


def test_condense_fills_holes_given_in_any_order() -> None:  # holds B05
    for holes in ([0, 1, 3], [3, 1, 0], []):
        table = make_table()
        for name in "abcde":
            table.add_request(make_request(name, [ord(name)], number=ord(name) - 96))
        for name in "abd":
            table.remove_request(name)
        table.num_computed_tokens[4] = 1
        table.condense(holes)
        assert table.req_ids == ["e", "c"]
        assert [table.row_of(name) for name in "ec"] == [0, 1]
        assert table.num_computed_tokens.tolist() == [1, 0, 0, 0, 0]
        for row in range(2, ROWS):
            assert_row_is_free(table, row)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["add", "remove", "swap", "append", "condense", "clear"]),
        st.integers(0, 9),
        st.integers(0, ROWS - 1),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=150)
@given(operations=OPERATIONS)
def test_table_agrees_with_a_dict(operations: list[tuple[str, int, int]]) -> None:  # holds B17
    table, model = make_table(), {}
    for step, (what, number, row) in enumerate(operations):
        name = f"r{number}"
        if what == "add" and len(model) < ROWS and all(name != m[0].request_id for m in model.values()):
            request = make_request(name, list(range(1, 2 + number)), number + step % 5)
            index = row if row not in model and step % 2 else None
            table.add_request(request, index)
            model[min(set(range(ROWS)) - set(model)) if index is None else index] = (request, [])
        elif what == "remove":
            found = next((r for r, m in model.items() if m[0].request_id == name), None)
            assert table.remove_request(name) == found
            model.pop(found, None)
        elif what == "swap" and row in model and number % ROWS in model:
            table.swap_states(row, number % ROWS)
            model[row], model[number % ROWS] = model[number % ROWS], model[row]
        elif what == "append" and row in model and table.num_tokens[row] < LENGTH:
            table.append_tokens(row, [number + 1])
            model[row][1].append(number + 1)
        elif what == "condense":
            table.condense([row])
            holes = [r for r in range(len(model)) if r not in model]
            moved = sorted((r for r in model if r >= len(model)), reverse=True)
            for hole, old in zip(holes, moved, strict=True):
                model[hole] = model.pop(old)
        elif what == "clear" and number < 2:
            table.clear()
            model = {}
        assert table.num_reqs == len(model)
        for r in range(ROWS):
            if r in model:
                assert_row_holds(table, r, *model[r])
                assert table.row_of(model[r][0].request_id) == r
            else:
                assert_row_is_free(table, r)
