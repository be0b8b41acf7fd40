"""Conformance suite of the ledger contract: reservations of cache space, without a device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from enginebay.contracts.cache import Lease, Ledger
from enginebay.errors import InternalError
from enginebay.plugins.registry import import_target
from enginebay_testing.ledger_machine import any_sequence_keeps_the_ledger_consistent
from enginebay_testing.verdicts import Check


@dataclasses.dataclass(frozen=True)
class LedgerUnderTest:
    """A ledger under test. It serves rows 0 to num_rows - 1, and a row that is alone can reserve
    max_tokens tokens.
    """

    ledger: Ledger
    num_rows: int
    max_tokens: int

    def admit(self, row: int, num_tokens: int) -> Lease | None:
        """Admit a prompt that shares no prefix with another row's prompt."""
        length = max(1, min(num_tokens, self.max_tokens) // 2)
        prompt = np.arange(length, dtype=np.int32) + row * self.max_tokens
        return self.ledger.admit(row, prompt, num_tokens)

    def must_admit(self, row: int, num_tokens: int) -> Lease:
        """Admit a prompt; AssertionError if the ledger refuses it."""
        lease = self.admit(row, num_tokens)
        assert lease is not None, (
            f"row {row} is refused {num_tokens} tokens, although they are free"
        )
        assert lease.row == row, f"the lease of row {row} says row {lease.row}"
        assert lease.capacity >= num_tokens, (
            f"{num_tokens} tokens were reserved, but the lease's capacity is {lease.capacity}"
        )
        assert lease.num_cached == 0, (
            f"num_cached is {lease.num_cached} for a new prompt, expected 0"
        )
        assert not lease.released, "a new lease is already released"
        return lease

    def admit_small(self) -> list[Lease]:
        """Admit every row; together the leases need no more than the room of one row."""
        return [
            self.must_admit(row, max(1, self.max_tokens // self.num_rows))
            for row in range(self.num_rows)
        ]

    @property
    def groups(self) -> list[str]:
        """Return all cache groups, groups with a state last; a row's page in such a group is its
        place.
        """
        return [*self.ledger.windows, *self.ledger.states]

    def tables(self, leases: list[Lease], fill: int = 0) -> np.ndarray:
        """Return page tables [groups, leases, columns] that the ledger wrote over `fill`; wide
        enough for pages of one token.
        """
        shape = (len(self.groups), max(len(leases), self.num_rows), self.max_tokens)
        tables = np.full(shape, fill, np.int32)
        for group, table in zip(self.groups, tables, strict=True):
            self.ledger.write_table(group, leases, table)
        return tables[:, : len(leases)]

    def pages(self, lease: Lease) -> set[tuple[str, int]]:
        """Return the pages of a lease with their groups. Trailing zeros are no pages, except that a
        table of zeros only means page 0.
        """
        found: set[tuple[str, int]] = set()
        for group, (row,) in zip(self.groups, self.tables([lease]), strict=True):
            last = max(1, int(np.max(np.flatnonzero(row), initial=-1)) + 1)
            found |= {(group, page) for page in row[:last].tolist()}
        return found

    def release(self, leases: list[Lease]) -> None:
        """Release all leases."""
        for lease in leases:
            self.ledger.release(lease)


@dataclasses.dataclass(frozen=True)
class LedgerExample:
    """The arguments of `ledger_checks` for the ledger of an engine. The engine's capability
    `ledger_example` names the plugin's function that makes this record.
    """

    make: Callable[[], Ledger]
    num_rows: int
    max_tokens: int
    page_size: int | None = None

    def checks(self) -> list[Check]:
        """Return every check of the suite, by name."""
        return ledger_checks(self.make, self.num_rows, self.max_tokens, self.page_size)


def ledger_checks(
    make: Callable[[], Ledger], num_rows: int, max_tokens: int, page_size: int | None = None
) -> list[Check]:
    """Return every check of the suite, by name. `make` may return the same ledger each time: each
    check releases all that it admits.

    `page_size` is the number of tokens of one entry of a page table; None: a row is one page.
    """
    checks = (
        everything_given_back_is_free_again,
        promises_never_exceed_what_is_free,
        refused_calls_change_nothing,
        reserve_grows_and_never_shrinks,
        releasing_twice_is_refused,
        tables_of_rows_do_not_overlap,
        tables_hold_nothing_else,
        a_row_that_is_alone_gets_the_most,
    )

    def run(check: Callable[[LedgerUnderTest], None]) -> None:
        check(LedgerUnderTest(make(), num_rows, max_tokens))

    named: list[Check] = [(check.__name__, lambda check=check: run(check)) for check in checks]  # type: ignore[misc]
    machine = functools.partial(
        any_sequence_keeps_the_ledger_consistent,
        make,
        num_rows,
        max_tokens,
        page_size or max_tokens,
    )
    return [*named, (any_sequence_keeps_the_ledger_consistent.__name__, machine)]


def example_checks(declared: str, part: str) -> list[Check]:
    """Return the checks for the ledger of an engine whose capability `ledger_example` is
    `declared`.

    If its function returns no LedgerExample, a single check fails with the reason.
    """
    try:
        example = import_target(declared, f"ledger_example of {part}")()
        assert isinstance(example, LedgerExample), (
            f"{declared} returns {type(example).__name__}, not a LedgerExample"
        )
        return example.checks()
    except Exception as error:  # noqa: BLE001  # the check reports what a plugin's function raises
        return [("ledger_example", functools.partial(_raise, error))]


def _raise(error: Exception) -> None:
    raise error


def everything_given_back_is_free_again(books: LedgerUnderTest) -> None:
    """Releasing all leases, in any order, frees all tokens again."""
    ledger = books.ledger
    free = ledger.num_free_tokens
    assert free >= books.max_tokens, (
        f"an empty ledger has {free} free tokens, but a row needs {books.max_tokens}"
    )
    for order in (1, -1):
        leases = books.admit_small()
        ledger.check()
        assert ledger.num_free_tokens < free, "admitting rows does not reduce num_free_tokens"
        books.release(leases[::order])
        assert all(lease.released for lease in leases), "`released` is not set in a released lease"
        ledger.check()
        assert ledger.num_free_tokens == free, (
            f"{free} tokens were free before, {ledger.num_free_tokens} are free now"
        )


def promises_never_exceed_what_is_free(books: LedgerUnderTest) -> None:
    """Rows that want the max are admitted until the ledger refuses one; each admission reduces the
    free tokens by what it reserves.
    """
    ledger = books.ledger
    leases = []
    for row in range(books.num_rows):
        before = ledger.num_free_tokens
        lease = books.admit(row, books.max_tokens)
        ledger.check()
        if lease is None:
            assert before < books.max_tokens, (
                f"row {row} is refused, although {before} tokens are free"
            )
            if before > 0:  # tokens that are free can be reserved
                leases.append(books.must_admit(row, before))
            break
        leases.append(lease)
        assert 0 <= ledger.num_free_tokens <= before - books.max_tokens, (
            f"{before} tokens were free before a reservation of {books.max_tokens}, now "
            f"{ledger.num_free_tokens} are"
        )
    books.release(leases)


def refused_calls_change_nothing(books: LedgerUnderTest) -> None:
    """A request for more than a row can have is refused, and the row can still be admitted, or
    continue, as before.
    """
    ledger = books.ledger
    free = ledger.num_free_tokens
    assert books.admit(0, free + 1) is None, (
        f"admit() reserved {free + 1} tokens, although {free} were free"
    )
    ledger.check()
    assert ledger.num_free_tokens == free, "a refused admission changes num_free_tokens"
    lease = books.must_admit(0, 1)
    before = (ledger.num_free_tokens, dataclasses.astuple(lease), books.pages(lease))
    assert not ledger.reserve(lease, free + 1), (
        f"reserve() grew a row to {free + 1} tokens, although {free} were free"
    )
    ledger.check()
    after = (ledger.num_free_tokens, dataclasses.astuple(lease), books.pages(lease))
    assert after == before, f"a refused reserve() changes {before} to {after}"
    books.release([lease])
    assert ledger.num_free_tokens == free


def reserve_grows_and_never_shrinks(books: LedgerUnderTest) -> None:
    """reserve() grows a lease to what is requested and keeps its pages; a smaller request shrinks
    nothing.
    """
    lease = books.must_admit(0, 1)
    first = books.pages(lease)
    for num_tokens in (books.max_tokens // 2, books.max_tokens, 1):
        capacity = lease.capacity
        assert books.ledger.reserve(lease, num_tokens), (
            f"reserve({num_tokens}) is refused to the only row"
        )
        assert lease.capacity >= max(num_tokens, capacity), (
            f"capacity {capacity} became {lease.capacity} after reserve({num_tokens})"
        )
        assert first <= books.pages(lease), "a row loses pages that hold its tokens when it grows"
        books.ledger.check()
    books.release([lease])


def releasing_twice_is_refused(books: LedgerUnderTest) -> None:
    """Releasing a lease twice raises InternalError, and a newer lease of the row stays
    unchanged.
    """
    old = books.must_admit(0, 1)
    books.release([old])
    free = books.ledger.num_free_tokens
    _assert_refuses_release(books, old)
    assert books.ledger.num_free_tokens == free, "a refused release changes num_free_tokens"
    new = books.must_admit(0, 1)
    pages = books.pages(new)
    _assert_refuses_release(books, old)
    assert not new.released, "releasing an old lease of a row again releases its new one"
    assert books.pages(new) == pages, "releasing an old lease of a row again changes its new one"
    books.release([new])
    assert books.ledger.num_free_tokens == free


def _assert_refuses_release(books: LedgerUnderTest, lease: Lease) -> None:
    try:
        books.ledger.release(lease)
    except InternalError:
        books.ledger.check()
    else:
        raise AssertionError("a lease can be released twice")


def tables_of_rows_do_not_overlap(books: LedgerUnderTest) -> None:
    """Rows whose prompts share no prefix share no page; a row that is admitted after a release may
    reuse pages.
    """
    leases = books.admit_small()
    for change in range(2):
        seen: dict[tuple[str, int], int] = {}
        for lease in leases:
            for page in books.pages(lease):
                assert page not in seen, (
                    f"page {page} is in the tables of rows {seen[page]} and {lease.row}"
                )
                seen[page] = lease.row
        if change == 0:
            books.release([leases.pop()])
            leases.append(books.must_admit(books.num_rows - 1, 1))
    books.release(leases)


def tables_hold_nothing_else(books: LedgerUnderTest) -> None:
    """A row of a table holds the pages of its lease and then zeros, whatever it held before, in the
    order of the leases.
    """
    leases = books.admit_small()
    written = books.tables(leases)
    for fill in (-1, 7):
        assert np.array_equal(books.tables(leases, fill), written), (
            f"write_table() left old entries ({fill}) in a table"
        )
    assert np.array_equal(books.tables(leases[::-1]), written[:, ::-1]), (
        "the rows of a table are not in the order of the leases"
    )
    books.release(leases)


def a_row_that_is_alone_gets_the_most(books: LedgerUnderTest) -> None:
    """A row that is alone can reserve max_tokens, at once and step by step, and not one
    token more.
    """
    ledger = books.ledger
    most = books.max_tokens if ledger.max_tokens is None else ledger.max_tokens
    assert most >= books.max_tokens, f"the only row gets {most} tokens, expected {books.max_tokens}"
    for first in (1, most):
        lease = books.must_admit(0, first)
        assert ledger.reserve(lease, most), f"the only row is refused {most} tokens"
        assert not ledger.reserve(lease, most + 1), (
            f"a row gets {most + 1} tokens, the max is {most}"
        )
        books.release([lease])
    assert books.admit(0, most + 1) is None, (
        f"a row is admitted with {most + 1} tokens, the max is {most}"
    )
