"""Checks that no sequence of calls breaks a ledger: a model of the loop and of the cache pages."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import ClassVar

import hypothesis
import numpy as np
from hypothesis import stateful
from hypothesis import strategies as st

from enginebay.contracts.cache import Ledger
from enginebay_testing.ledger_device import Device, Row, whole_prefixes

FIRST_TOKEN = 1 << 20
"""Smallest token of the model, above every vocabulary, so that no real prompt matches a prefix that
the model leaves in a ledger's index.
"""


MAX_WORLDS = 8000
"""Max number of worlds; each uses its own range of tokens, all below 2**30."""


@dataclasses.dataclass
class LedgerModel:
    """A ledger with rows 0 to num_rows - 1 of at most max_tokens, and a model of the device that
    its tables describe.

    A page has `page_size` tokens, or max_tokens where a row is one page. Every action ends with the
    ledger's own check.
    """

    ledger: Ledger
    num_rows: int
    max_tokens: int
    page_size: int
    device: Device = dataclasses.field(default_factory=Device)
    rows: dict[int, Row] = dataclasses.field(default_factory=dict)
    known: list[list[int]] = dataclasses.field(default_factory=list)
    """Tokens of earlier requests; later prompts can begin with the same tokens."""
    first_token: int = FIRST_TOKEN
    """Tokens of this world are near this number, so that worlds of one ledger share no prefix."""

    @property
    def block_size(self) -> int:
        """Return the size of the blocks of tokens that prompts are made of: a page, if pages are
        small. Two prompts share whole blocks only.
        """
        return max(1, min(self.page_size, self.max_tokens // 8))

    def prompt(self, like: int, num_alike: int, kinds: Sequence[int], num_cut: int) -> list[int]:
        """Return the first blocks of an earlier request, then a block of each kind, without the
        last `num_cut` tokens.
        """
        begin = self.known[like % len(self.known)] if self.known else []
        token_ids = begin[: num_alike * self.block_size]
        for kind in kinds:
            token_ids = [
                *token_ids,
                *(self.first_token + 1000 * kind + (5 * i) % 7 for i in range(self.block_size)),
            ]
        return token_ids[: max(1, min(len(token_ids), self.max_tokens) - num_cut)] or [
            self.first_token
        ]

    def add(self, row: int, prompt: list[int], num_new: int, *, forked: bool = False) -> bool:
        """Admit a request that may get `num_new` more tokens to a free row. Return whether there
        was room. `forked`: others may share all of its prompt except the last token.
        """
        free = self.ledger.num_free_tokens
        wanted = len(prompt) + (
            1 if self.ledger.grows else min(num_new, self.max_tokens - len(prompt))
        )
        token_ids = np.asarray(prompt, np.int32)
        num_cached = self.ledger.num_cached_tokens(token_ids)
        lease = self.ledger.admit(row, token_ids, wanted)
        self.ledger.check()
        if lease is None:
            assert self.ledger.num_free_tokens == free, (
                "a refused admission changes num_free_tokens"
            )
            assert self.rows or free < wanted, (
                f"{wanted} tokens are refused, although {free} are free and no row runs"
            )
            return False
        assert lease.capacity >= wanted, (
            f"{wanted} tokens were reserved, but the lease's capacity is {lease.capacity}"
        )
        assert lease.num_cached == num_cached, (
            f"{num_cached} tokens were cached, but lease.num_cached is {lease.num_cached}"
        )
        assert lease.num_cached < len(prompt), (
            "the whole prompt is cached: at least its last token must be computed"
        )
        cached, fork_at = lease.num_cached, len(prompt) - 1 if forked else None
        self.rows[row] = Row(lease, prompt, len(prompt), cached, cached, fork_at)
        return True

    def fork(self, row: int, new_row: int, num_less: int) -> bool:
        """Admit a request to a free row with another row's committed tokens, except the last
        `num_less`. Return whether there was room.
        """
        one, free = self.rows[row], self.ledger.num_free_tokens
        num_cached = one.num_committed - num_less
        tables = self._tables(one)
        lease = self.ledger.fork(one.lease, new_row, num_cached, num_cached + 1)
        self.ledger.check()
        assert np.array_equal(self._tables(one), tables), (
            "a fork changes the table of the row that it shares tokens with"
        )
        if lease is None:
            assert self.ledger.num_free_tokens == free, "a refused fork changes num_free_tokens"
            return False
        assert lease.capacity > num_cached, (
            f"a fork of {num_cached} tokens has no room for the next one"
        )
        is_partial = any(self.ledger.windows.values()) or self.ledger.states
        may_have_fewer = is_partial and lease.num_cached < num_cached
        assert may_have_fewer or lease.num_cached == num_cached, (
            f"{num_cached} tokens are shared, but lease.num_cached is {lease.num_cached}"
        )
        token_ids = [*one.token_ids[:num_cached], self.first_token + 10_000 + new_row]
        self.rows[new_row] = Row(
            lease, token_ids, len(token_ids), lease.num_cached, lease.num_cached
        )
        return True

    def step(self, row: int, num_tokens: int) -> bool:
        """Compute more tokens of a row, as a step does. Return whether there was room. Chunks of a
        prompt end where the ledger says; after each chunk the prompt is committed if a group has a
        state.
        """
        one = self.rows[row]
        is_prompt, end = one.num_computed < one.num_prompt, one.num_computed + num_tokens
        end = min(end, self.max_tokens)
        if is_prompt:
            cut = self.ledger.chunk_end(one.lease, one.num_prompt, one.fork_at)
            assert one.num_computed < cut <= one.num_prompt, (
                f"a prompt of {one.num_prompt} tokens, of which {one.num_computed} are computed, "
                f"is cut after {cut}"
            )
            end = min(end, cut)
        if not self.ledger.grows:
            end = min(end, one.lease.capacity)
        if self.ledger.max_ahead is not None:
            end = min(end, one.num_committed + self.ledger.max_ahead)
        free, tables = self.ledger.num_free_tokens, self._tables(one)
        if not self.ledger.reserve(one.lease, end):
            assert self.ledger.num_free_tokens == free, (
                "a refused reserve() changes num_free_tokens"
            )
            assert np.array_equal(self._tables(one), tables), "a refused reserve() changes a table"
            assert len(self.rows) > 1, f"the only row is refused its token {end}"
            return False
        while len(one.token_ids) < end:
            one.token_ids.append(self.first_token - 1 - len(one.token_ids) * self.num_rows - row)
        self._run_moves()
        self._write(row, one.num_computed, end)
        one.num_computed = max(one.num_computed, end)
        self.check()
        if is_prompt and self.ledger.states:
            self.commit(row)
        return True

    def commit(self, row: int) -> None:
        """Commit the computed tokens to the ledger."""
        one = self.rows[row]
        self.ledger.commit(one.lease, np.asarray(one.token_ids[: one.num_computed], np.int32))
        one.num_committed = one.num_computed
        self.ledger.check()

    def release(self, row: int) -> None:
        """End, abort or preempt a request. Its tokens are kept, so that a later request may have
        them as its prefix.
        """
        one = self.rows.pop(row)
        self.known = [*self.known[-7:], one.token_ids]
        self.ledger.release(one.lease)
        self.ledger.check()

    def check(self) -> None:
        """Run the ledger's check, and check that every row finds its own keys and values through
        its tables. In a group with a window, only the positions count that the row still reads
        after its committed tokens.
        """
        self.ledger.check()
        self.device.check_places(self.ledger, self.rows)
        for row, one in self.rows.items():
            values = whole_prefixes(one.token_ids)
            for (group, window), table in zip(
                self.ledger.windows.items(), self._tables(one), strict=True
            ):
                first = 0 if window is None else max(0, one.num_committed + 1 - window)
                for position in range(first, one.num_computed):
                    place = self._place(group, table, position)
                    assert self.device.contents.get(place) == values[position], (
                        f"row {row} finds other tokens' keys at position {position}, page "
                        f"{place[1]}"
                    )
                if window is not None and self.ledger.max_ahead is not None:
                    most = -(-(window + self.ledger.max_ahead) // self.page_size) + 1
                    assert np.count_nonzero(table) <= most, (
                        f"row {row} holds {np.count_nonzero(table)} pages for a window of {window} "
                        f"tokens, at most {most} are allowed"
                    )

    def _run_moves(self) -> None:
        for move in self.ledger.take_moves():
            slot = move.target if move.kind == "out" else move.source
            num_slots = self.ledger.host_slots.get(move.group, 0)
            assert move.kind == "copy" or 0 <= slot < num_slots, (
                f"{move} uses slot {slot} of the host, of {num_slots} in host_slots"
            )
            self.device.run(move, self.page_size)
        self.check()

    def _write(self, row: int, start: int, end: int) -> None:
        one = self.rows[row]
        values = whole_prefixes(one.token_ids)
        self.device.write_places(self.ledger, one.lease, values[end - 1])
        for i, (group, table) in enumerate(
            zip(self.ledger.windows, self._tables(one), strict=True)
        ):
            written = {int(table[p // self.page_size]) for p in range(start, end)}
            for other, two in self.rows.items():
                shared = written & self._pages(two, i) if other != row else set()
                assert not shared, f"row {row} writes to pages {shared}, which row {other} shares"
            for position in range(start, end):
                self.device.contents[self._place(group, table, position)] = values[position]

    def _place(self, group: str, table: np.ndarray, position: int) -> tuple[str, int, int]:
        return group, int(table[position // self.page_size]), position % self.page_size

    def _tables(self, one: Row) -> np.ndarray:
        """Return the row's part of each group's table, [groups, pages]."""
        groups = self.ledger.windows
        tables = np.zeros((len(groups), 1, -(-self.max_tokens // self.page_size)), np.int32)
        for group, table in zip(groups, tables, strict=True):
            self.ledger.write_table(group, [one.lease], table)
        return tables[:, 0]

    def _pages(self, one: Row, group: int) -> set[int]:
        """Return the pages that a lease reserves in the group of this number."""
        num_tokens = min(one.lease.capacity, self.max_tokens)
        pages = self._tables(one)[group, : -(-num_tokens // self.page_size)].tolist()
        is_whole = list(self.ledger.windows.values())[group] is None
        return set(pages) if is_whole else set(pages) - {0}


class LedgerStateMachine(stateful.RuleBasedStateMachine):
    """Requests that share prefixes arrive, grow, commit and end in any order; at the end, all space
    is free again.
    """

    make_simulation: ClassVar[Callable[[], LedgerModel]]

    def __init__(self) -> None:
        super().__init__()
        self.world = type(self).make_simulation()
        self.free = self.world.ledger.num_free_tokens

    def row(self, which: int) -> int:
        """Return one of the running rows."""
        return sorted(self.world.rows)[which % len(self.world.rows)]

    @stateful.precondition(lambda self: len(self.world.rows) < self.world.num_rows)
    @stateful.rule(
        like=st.integers(0, 40),
        alike=st.integers(0, 8),
        kinds=st.lists(st.integers(0, 2), max_size=5),
        cut=st.sampled_from((0, 0, 0, 1, 3)),
        new=st.integers(1, 64),
        forked=st.booleans(),
    )
    def add(
        self, like: int, alike: int, kinds: list[int], cut: int, new: int, *, forked: bool
    ) -> None:
        """Admit a request."""
        rows = [row for row in range(self.world.num_rows) if row not in self.world.rows]
        prompt = self.world.prompt(like, alike, kinds, cut)[: self.world.max_tokens - 1]
        self.world.add(rows[like % len(rows)], prompt, new, forked=forked)

    @stateful.precondition(lambda self: self.world.ledger.forks and self.world.rows)
    @stateful.rule(which=st.integers(0, 40), into=st.integers(0, 40), less=st.integers(0, 2))
    def fork(self, which: int, into: int, less: int) -> None:
        """Admit a request that shares a row's tokens, if a row has some and another row is free."""
        world, row = self.world, self.row(which)
        free = [r for r in range(world.num_rows) if r not in world.rows]
        if free and less < world.rows[row].num_committed < world.max_tokens:
            world.fork(row, free[into % len(free)], less)

    @stateful.precondition(lambda self: self.world.rows)
    @stateful.rule(
        which=st.integers(0, 40), tokens=st.integers(1, 64), commit=st.sampled_from((True, False))
    )
    def step(self, which: int, tokens: int, *, commit: bool) -> None:
        """Compute some tokens of a row."""
        row = self.row(which)
        if self.world.step(row, tokens) and commit:
            self.world.commit(row)

    @stateful.precondition(lambda self: self.world.rows)
    @stateful.rule(which=st.integers(0, 40))
    def commit(self, which: int) -> None:
        """Commit the computed tokens of a row, if any are not committed."""
        self.world.commit(self.row(which))

    @stateful.precondition(lambda self: self.world.rows)
    @stateful.rule(which=st.integers(0, 40))
    def release(self, which: int) -> None:
        """End or preempt a request."""
        self.world.release(self.row(which))

    def teardown(self) -> None:
        """End all requests."""
        for row in list(self.world.rows):
            self.world.release(row)
        free = self.world.ledger.num_free_tokens
        assert free == self.free, (
            f"{self.free} tokens were free at the start, {free} are free at the end"
        )


def any_sequence_keeps_the_ledger_consistent(
    make: Callable[[], Ledger], num_rows: int, max_tokens: int, page_size: int
) -> None:
    """The ledger stays consistent while requests arrive, share prefixes, grow, commit, end and are
    preempted in any order, also when cached pages are evicted.

    `make` may return the same ledger each time.
    """
    devices: dict[int, tuple[Ledger, Device]] = {}

    numbers = itertools.cycle(range(MAX_WORLDS))

    def make_simulation() -> LedgerModel:
        ledger = make()
        _, device = devices.setdefault(id(ledger), (ledger, Device()))
        first_token = FIRST_TOKEN + (next(numbers) << 16)
        return LedgerModel(ledger, num_rows, max_tokens, page_size, device, first_token=first_token)

    settings = hypothesis.settings(
        max_examples=60,
        stateful_step_count=50,
        deadline=None,
        derandomize=True,
        database=None,
        report_multiple_bugs=False,
    )
    machine = type(
        "Machine", (LedgerStateMachine,), {"make_simulation": staticmethod(make_simulation)}
    )
    stateful.run_state_machine_as_test(machine, settings=settings)
