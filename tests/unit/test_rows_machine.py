"""Whatever the order of operations, the row table holds what a dict of requests by row holds."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from enginebay.types import Request
from tests.unit.rowtable import (
    LENGTH,
    ROWS,
    assert_row_holds,
    assert_row_is_free,
    make_request,
    make_table,
    pages_of,
)

pytestmark = pytest.mark.usefixtures("row_tables")


@dataclasses.dataclass
class Row:
    """What the model knows of one row."""

    request: Request
    pages: tuple[list[int], list[int]]
    output: list[int] = dataclasses.field(default_factory=list)
    num_computed: int = 0


class RowMachine(RuleBasedStateMachine):
    """Random operations on a table and on a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.table = make_table()
        self.model: dict[int, Row] = {}
        self.added = 0

    def some_row(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.model)))

    @precondition(lambda self: len(self.model) < ROWS)
    @rule(
        data=st.data(),
        number=st.integers(0, 9),
        length=st.integers(1, LENGTH + 2),
        chosen=st.booleans(),
    )
    def add(self, data: st.DataObject, number: int, length: int, chosen: bool) -> None:
        free = sorted(set(range(ROWS)) - set(self.model))
        row = data.draw(st.sampled_from(free)) if chosen else free[0]
        self.added += 1
        request = make_request(f"r{self.added}", [number + 1] * length, number)
        self.table.add_request(request, row if chosen else None)
        self.model[row] = Row(request, pages=([self.added], [self.added, number]))
        for pages, page_ids in zip(self.table.page_tables, self.model[row].pages, strict=True):
            pages.append(row, page_ids)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def wrong_additions(self, data: st.DataObject) -> None:
        row = self.some_row(data)
        with pytest.raises(ValueError):
            self.table.add_request(self.model[row].request)
        with pytest.raises(ValueError):
            self.table.add_request(make_request("new", [1]), row)
        if len(self.model) == ROWS:
            with pytest.raises(RuntimeError):
                self.table.add_request(make_request("new", [1]))

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        row = self.some_row(data)
        assert self.table.remove_request(self.model.pop(row).request.request_id) == row

    @precondition(lambda self: self.model)
    @rule(
        data=st.data(),
        tokens=st.lists(st.integers(1, 99), max_size=4),
        computed=st.integers(0, LENGTH),
    )
    def append(self, data: st.DataObject, tokens: list[int], computed: int) -> None:
        row = self.some_row(data)
        self.model[row].num_computed = self.table.num_computed_tokens[row] = computed
        if self.table.num_tokens[row] + len(tokens) > LENGTH:
            with pytest.raises(ValueError):
                self.table.append_tokens(row, tokens)
        else:
            self.table.append_tokens(row, tokens)
            self.model[row].output += tokens

    @precondition(lambda self: self.model)
    @rule(data=st.data(), token_ids=st.lists(st.integers(1, 99), min_size=12, max_size=12))
    def append_step(self, data: st.DataObject, token_ids: list[int]) -> None:
        rows = data.draw(st.lists(st.sampled_from(sorted(self.model)), max_size=4, unique=True))
        counts = [data.draw(st.integers(0, 3)) for _ in rows]
        tokens = np.asarray(token_ids, np.int32).reshape(4, 3)[: len(rows)]
        given = np.asarray(rows, np.int32), tokens, np.asarray(counts, np.int32)
        ends = [self.table.num_tokens[row] + n for row, n in zip(rows, counts, strict=True)]
        if max(ends, default=0) > LENGTH:
            with pytest.raises(ValueError):
                self.table.table.append_step(*given)
            return
        self.table.table.append_step(*given)
        for row, count, some in zip(rows, counts, tokens.tolist(), strict=True):
            self.model[row].output += some[:count]

    @precondition(lambda self: self.model)
    @rule(data=st.data(), group=st.integers(0, 1), pages=st.lists(st.integers(1, 99), max_size=2))
    def give_pages(self, data: st.DataObject, group: int, pages: list[int]) -> None:
        row = self.some_row(data)
        table, held = self.table.page_tables[group], self.model[row].pages[group]
        if len(held) + len(pages) > table.max_pages_per_req:
            with pytest.raises(ValueError):
                table.append(row, pages)
        else:
            table.append(row, pages)
            held += pages

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def swap(self, data: st.DataObject) -> None:
        one, other = self.some_row(data), self.some_row(data)
        self.table.swap_states(one, other)
        self.model[one], self.model[other] = self.model[other], self.model[one]

    @rule(data=st.data())
    def condense(self, data: st.DataObject) -> None:
        free = sorted(set(range(ROWS)) - set(self.model))
        self.table.condense(data.draw(st.permutations(free)))
        holes = [row for row in free if row < len(self.model)]
        moved = sorted((row for row in self.model if row >= len(self.model)), reverse=True)
        for hole, old in zip(holes, moved, strict=True):
            self.model[hole] = self.model.pop(old)

    @rule(really=st.integers(0, 3))
    def clear(self, really: int) -> None:
        if not really:
            self.table.clear()
            self.model = {}

    @invariant()
    def table_holds_the_model(self) -> None:
        table = self.table
        assert table.num_reqs == len(self.model)
        assert table.req_ids == [self.model[row].request.request_id for row in sorted(self.model)]
        for row in range(ROWS):
            if row not in self.model:
                assert_row_is_free(table, row)
                continue
            wanted = self.model[row]
            assert_row_holds(table, row, wanted.request, wanted.output)
            assert table.row_of(wanted.request.request_id) == row
            assert table.num_computed_tokens[row] == wanted.num_computed
            assert pages_of(table, row) == list(wanted.pages)
        penalised = [
            row for row in sorted(self.model) if self.model[row].request.sampling.penalises
        ]
        assert table.get_request_indices_with_penalty().tolist() == penalised
        assert table.all_greedy == all(
            not r.request.sampling.params.temperature for r in self.model.values()
        )


def test_table_agrees_with_a_dict_after_any_operations() -> None:  # holds B17
    run_state_machine_as_test(
        RowMachine, settings=settings(deadline=None, max_examples=60, stateful_step_count=30)
    )
