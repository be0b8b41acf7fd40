"""The row table's operations: what they change, what they leave alone and what they refuse."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from enginebay.errors import InputError
from enginebay.types import MAX_STOP_TOKENS, SamplingParams
from enginebay_oengine import SequenceBuffer
from tests.unit.rowtable import (
    LENGTH,
    PAGE_SIZES,
    ROWS,
    VOCAB,
    EngineRequest,
    assert_row_holds,
    assert_row_is_free,
    make_request,
    make_sampling,
    make_table,
    pages_of,
    with_fields,
)

pytestmark = pytest.mark.usefixtures("row_tables")
COLUMNS = (
    "token_ids",
    "num_tokens",
    "num_prompt_tokens",
    "num_computed_tokens",
    "temperature",
    "top_p",
    "min_p",
    "top_k",
    "frequency_penalties",
    "presence_penalties",
    "repetition_penalties",
    "stop_token_ids",
    "keys",
    "returns_logprobs",
    "variants",
)


def numbered_table(names: str) -> SequenceBuffer:
    """A table of requests that differ in everything, pages included."""
    table = make_table()
    for number, name in enumerate(names, start=1):
        table.add_request(make_request(name, [number] * number, number))
        for group, pages in enumerate(table.page_tables):
            pages.append(number - 1, [10 * number + group] * (number % 3 + 1))
        table.num_computed_tokens[number - 1] = number
    return table


def state(table: SequenceBuffer) -> list[np.ndarray]:
    """Copies of all columns and of the page tables."""
    arrays = [getattr(table, name) for name in COLUMNS]
    arrays += [array for pages in table.page_tables for array in (pages.page_ids, pages.num_pages)]
    return [array.copy() for array in arrays]


def assert_same(first: list[np.ndarray], second: list[np.ndarray]) -> None:
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


def test_table_has_a_page_table_for_each_group_and_host_arrays_only() -> None:  # holds B01
    table = SequenceBuffer(3, 10, 64, VOCAB, [4, 3, 16])
    assert [pages.page_ids.shape for pages in table.page_tables] == [(3, 3), (3, 4), (3, 1)]
    assert [pages.page_size for pages in table.page_tables] == table.page_sizes == [4, 3, 16]
    assert all(p.page_ids.dtype == p.num_pages.dtype == np.int32 for p in table.page_tables)
    assert len(state(table)) == 15 + 6
    assert table.sharding is None
    assert SequenceBuffer(3, 10, 64, VOCAB, [4], sharding="a sharding").sharding == "a sharding"
    for counts in ([0, 10, 64, VOCAB, [4]], [3, 10, 64, VOCAB, []], [3, 10, 64, VOCAB, [4, 0]]):
        with pytest.raises(ValueError, match="at least one page size"):
            SequenceBuffer(*counts)


def test_methods_change_the_table_and_return_nothing() -> None:  # holds B01
    table = make_table()
    assert table.add_request(make_request("a", [1])) is None
    assert table.begin_sequence("b", [1]) is None
    assert table.append_tokens(0, [2]) is None
    assert table.swap_states(0, 1) is None
    assert table.condense([]) is None
    assert table.clear() is None


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
    before = state(table)
    with pytest.raises(ValueError, match=r"request id 'a'.*row 3"):
        table.add_request(make_request("a", [1]))
    with pytest.raises(ValueError, match="row 3, which is taken"):
        table.add_request(make_request("b", [1]), req_index=3)
    for index in (ROWS, -1):
        with pytest.raises(IndexError, match=f"row {index}.*0 to {ROWS - 1}"):
            table.add_request(make_request("b", [1]), req_index=index)
    assert_same(before, state(table))
    for name in "cdef":
        table.add_request(make_request(name, [1]))
    with pytest.raises(RuntimeError, match="rows are taken"):
        table.add_request(make_request("g", [1]))
    for index in range(ROWS):
        with pytest.raises(ValueError, match=f"row {index}, which is taken"):
            table.add_request(make_request("g", [1]), req_index=index)
    assert table.num_reqs == ROWS
    assert table.req_ids == ["c", "d", "e", "a", "f"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"page_ids": [1, 2]}, "page ids for 1 cache groups.*all 2 groups"),
        ({"page_ids": [[1], [1], [1]]}, "page ids for 3 cache groups"),
        ({"page_ids": [[1, 2, 3, 4], []]}, "4 pages of 4 tokens.*Allowed: 3"),
        (
            {"sampling_params": SamplingParams(stop_token_ids=range(17))},
            f"17 stop tokens.*{MAX_STOP_TOKENS}",
        ),
        ({"sampling_params": {"logit_bias": {VOCAB: 1.0}}}, r"\[100\] in logit_bias.*0 to 99"),
        ({"sampling_params": {"allowed_token_ids": [0, -1]}}, r"\[-1\] in allowed_token_ids"),
        ({"sampling_params": {"allowed_token_ids": []}}, "an empty allowed_token_ids"),
        (
            {"sampling_params": {"bad_words_token_ids": [[1], [2, 200]]}},
            r"\[200\] in bad_words_token_ids",
        ),
    ],
)
def test_requests_that_do_not_fit_are_refused_and_change_nothing(
    fields: dict, message: str
) -> None:
    sampling = fields.get("sampling_params")
    if isinstance(sampling, dict):
        fields = {"sampling_params": with_fields(make_sampling(), **sampling)}
    table = make_table()
    before = state(table)
    with pytest.raises(ValueError, match=message):
        table.add_request(EngineRequest("a", [1], **fields))
    with pytest.raises(ValueError, match="int without req_id, prompt_token_ids, sampling_params"):
        table.add_request(3)
    assert_same(before, state(table))
    assert table.num_reqs == 0


def test_documented_record_brings_output_pages_and_parameters() -> None:  # holds B03
    table = make_table()
    params = SamplingParams(temperature=0.5, top_k=-1, max_tokens=3, stop_token_ids=(7,))
    table.add_request(EngineRequest("a", [1, 2, 3], params, [[5, 6], [7]], output_token_ids=(8, 9)))
    assert table.token_ids[0, :6].tolist() == [1, 2, 3, 8, 9, 0]
    assert (table.num_tokens[0], table.num_prompt_tokens[0], table.num_computed_tokens[0]) == (
        5,
        3,
        0,
    )
    assert pages_of(table, 0) == [[5, 6], [7]]
    assert (table.temperature[0], table.top_k[0], table.stop_token_ids[0, 0]) == (0.5, 0, 7)
    assert table.request(0).request_id == "a"
    assert table.request(0).sampling.max_tokens == 3

    one_group = SequenceBuffer(ROWS, LENGTH, 64, VOCAB, [4])
    one_group.add_request(EngineRequest("a", [1], page_ids=[5, 6]))
    assert one_group.page_tables[0].page_ids[0].tolist() == [5, 6, 0]


def test_what_exceeds_the_context_is_cut_off_prompt_then_output() -> None:  # holds B03
    table = make_table()
    table.add_request(EngineRequest("a", list(range(1, LENGTH)), output_token_ids=(8, 9)))
    assert (table.num_prompt_tokens[0], table.num_tokens[0]) == (LENGTH - 1, LENGTH)
    assert table.token_ids[0, -1] == 8
    table.add_request(EngineRequest("b", list(range(1, LENGTH + 5)), output_token_ids=(8, 9)))
    assert table.num_prompt_tokens[1] == table.num_tokens[1] == LENGTH
    assert table.token_ids[1].tolist() == list(range(1, LENGTH + 1))
    with pytest.raises(ValueError, match="1 tokens after the 12"):
        table.append_tokens(0, [1])
    with pytest.raises(AssertionError, match="row 2 is free"):
        table.append_tokens(2, [1])


def test_a_steps_tokens_are_appended_as_row_by_row() -> None:
    together, alone = numbered_table("abc"), numbered_table("abc")
    tokens = np.asarray([[5, 6, 7], [8, -1, -1], [-1, -1, -1]], np.int32)
    rows, counts = np.asarray([2, 0, 1]), np.asarray([3, 1, 0])
    together.table.append_step(rows, tokens, counts)
    for row, count, new in zip(rows, counts, tokens, strict=True):
        alone.append_tokens(int(row), new[:count])
    assert_same(state(together), state(alone))
    before = state(together)
    with pytest.raises(ValueError, match=f"{LENGTH} tokens after the 6 of row 2"):
        together.table.append_step(
            np.asarray([0, 2]), np.ones((2, LENGTH), np.int32), np.asarray([1, LENGTH])
        )
    assert_same(state(together), before)


def test_adding_writes_one_row_and_allocates_no_table() -> None:  # holds B03
    table = make_table()
    table.token_ids[1:] = (
        77  # what a copy of the whole matrix, or a write beyond the prompt, would touch
    )
    table.token_ids[0, 4:] = 77
    owners = {name: id(value) for name, value in vars(table).items()}
    table.add_request(make_request("a", [1, 2, 3, 4]))
    assert (table.token_ids.ravel()[4:] == 77).all()
    assert {name: id(value) for name, value in vars(table).items()} == owners

    wide = SequenceBuffer(64, 4096, 64, VOCAB, [4])
    request = make_request("a", [1, 2, 3, 4])
    tracemalloc.start()
    try:
        wide.add_request(request)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < wide.token_ids.nbytes // 16, "a copy of the table has the table's size"


def test_removing_clears_every_column_and_an_unknown_id_is_none() -> None:  # holds B04
    table = numbered_table("abc")
    table.append_tokens(1, [5])
    assert table.remove_request("x") is None
    assert table.remove_request("b") == 1
    assert_row_is_free(table, 1)
    assert table.row_of("b") is None
    assert_row_holds(table, 0, table.request(0), [])
    assert_row_holds(table, 2, table.request(2), [])


def test_new_request_in_a_used_row_sees_nothing_of_the_one_before() -> None:  # holds B04
    table = numbered_table("a")
    table.remove_request("a")
    table.begin_sequence("b", [1])
    assert table.row_of("b") == 0
    assert table.get_active_sampling_params(0) == {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
    assert table.no_penalties
    assert table.no_min_p
    assert table.no_allowed_token_ids
    assert table.no_prompt_logprob
    assert table.max_num_logprobs is None
    assert pages_of(table, 0) == [[], []]
    table.remove_request("b")
    assert_row_is_free(table, 0)


@pytest.mark.parametrize("holes", [[0, 1, 3], [3, 1, 0], [1, 3, 0], []])
def test_condense_moves_everything_into_holes_given_in_any_order(
    holes: list[int],
) -> None:  # holds B05
    table = numbered_table("abcde")
    kept = {
        name: (table.request("abcde".index(name)), pages_of(table, "abcde".index(name)))
        for name in "ec"
    }
    for name in "abd":
        table.remove_request(name)
    table.condense(holes)
    assert table.req_ids == ["e", "c"]
    assert table.num_computed_tokens.tolist() == [5, 3, 0, 0, 0]
    for row, name in enumerate("ec"):
        request, pages = kept[name]
        assert table.row_of(name) == row
        assert_row_holds(table, row, request, [])
        assert pages_of(table, row) == pages
    for row in range(2, ROWS):
        assert_row_is_free(table, row)


def test_condensing_a_packed_or_an_empty_table_changes_nothing() -> None:  # holds B05
    for table in (numbered_table("abc"), make_table()):
        before = state(table)
        table.condense([3, 4])
        assert_same(before, state(table))


def test_swapping_exchanges_everything_and_twice_is_nothing() -> None:  # holds B06
    table = numbered_table("abc")
    before, first, third = state(table), table.request(0), table.request(2)
    pages = [pages_of(table, row) for row in (0, 2)]
    table.swap_states(0, 2)
    assert (table.row_of("a"), table.row_of("c")) == (2, 0)
    assert_row_holds(table, 0, third, [])
    assert_row_holds(table, 2, first, [])
    assert [pages_of(table, row) for row in (2, 0)] == pages
    assert table.num_computed_tokens.tolist() == [3, 2, 1, 0, 0]
    table.swap_states(2, 0)
    assert_same(before, state(table))
    assert_row_holds(table, 0, first, [])
    table.swap_states(1, 1)
    assert_same(before, state(table))
    assert table.req_ids == ["a", "b", "c"]


def test_swapping_needs_two_taken_rows() -> None:  # holds B06
    table = numbered_table("a")
    for pair in ((0, 1), (1, 0), (1, 1), (0, -ROWS), (0, ROWS)):
        with pytest.raises(AssertionError, match="is free"):
            table.swap_states(*pair)
    assert_row_holds(table, 0, table.request(0), [])


def test_clearing_leaves_an_empty_table_of_the_same_size() -> None:  # holds B07
    table = numbered_table("abcde")
    table.clear()
    assert_same(state(make_table()), state(table))
    assert (table.num_reqs, table.req_ids, table.page_sizes) == (0, [], PAGE_SIZES)
    for row in range(ROWS):
        assert_row_is_free(table, row)
    table.begin_sequence("a", [1])
    assert table.row_of("a") == 0


def test_a_table_may_be_of_one_row_token_and_word_but_not_of_none() -> None:
    smallest = SequenceBuffer(1, 1, 1, 1, [1])
    smallest.begin_sequence("only", [0])
    assert smallest.prepare_batch().token_ids.tolist() == [0]
    for number in range(4):
        counts = [1] * 4
        counts[number] = 0
        with pytest.raises(InputError, match="numbers of at least 1"):
            SequenceBuffer(*counts, [1])
