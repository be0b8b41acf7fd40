"""Conformance suite of the ledger contract: promises of cache space, by the books alone."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from enginebay.cache import Lease, Ledger
from enginebay.errors import InternalError
from enginebay.registry import import_target
from enginebay_testing.ledger_machine import any_sequence_keeps_the_books
from enginebay_testing.verdicts import Check


@dataclasses.dataclass(frozen=True)
class Books:
    """A ledger under test: it serves rows 0 to num_rows - 1, each with room for max_tokens when it
    is alone.
    """

    ledger: Ledger
    num_rows: int
    max_tokens: int

    def admit(self, row: int, num_tokens: int) -> Lease | None:
        """Admit a prompt that shares no prefix with another row's."""
        length = max(1, min(num_tokens, self.max_tokens) // 2)
        prompt = np.arange(length, dtype=np.int32) + row * self.max_tokens
        return self.ledger.admit(row, prompt, num_tokens)

    def must_admit(self, row: int, num_tokens: int) -> Lease:
        """The same where there is room."""
        lease = self.admit(row, num_tokens)
        assert lease is not None, f"row {row} is refused {num_tokens} tokens that are free"
        assert lease.row == row, f"the lease of row {row} says row {lease.row}"
        assert lease.capacity >= num_tokens, (
            f"{num_tokens} tokens were promised, the lease has {lease.capacity}"
        )
        assert lease.num_cached == 0, (
            f"{lease.num_cached} tokens of a new prompt are said to be cached"
        )
        assert not lease.released, "a new lease is already released"
        return lease

    def admit_small(self) -> list[Lease]:
        """A lease for every row, together no more than one row's room."""
        return [
            self.must_admit(row, max(1, self.max_tokens // self.num_rows))
            for row in range(self.num_rows)
        ]

    @property
    def groups(self) -> list[str]:
        """All cache groups, those with a state last: a row's pages there are its place."""
        return [*self.ledger.windows, *self.ledger.states]

    def tables(self, leases: list[Lease], fill: int = 0) -> np.ndarray:
        """[groups, leases, columns]: the leases' rows of page tables that held `fill` everywhere;
        wide enough for pages of one token.
        """
        shape = (len(self.groups), max(len(leases), self.num_rows), self.max_tokens)
        tables = np.full(shape, fill, np.int32)
        for group, table in zip(self.groups, tables, strict=True):
            self.ledger.write_table(group, leases, table)
        return tables[:, : len(leases)]

    def pages(self, lease: Lease) -> set[tuple[str, int]]:
        """The pages of a lease with their groups. The zeros after them are no pages, but a row that
        is all zeros has page 0.
        """
        found: set[tuple[str, int]] = set()
        for group, (row,) in zip(self.groups, self.tables([lease]), strict=True):
            last = max(1, int(np.max(np.flatnonzero(row), initial=-1)) + 1)
            found |= {(group, page) for page in row[:last].tolist()}
        return found

    def release(self, leases: list[Lease]) -> None:
        """Give all back."""
        for lease in leases:
            self.ledger.release(lease)


@dataclasses.dataclass(frozen=True)
class LedgerExample:
    """What the suite of the kind `cache` runs on: the arguments of `ledger_checks`. A plugin's
    function makes it, which the capability `example` names.
    """

    make: Callable[[], Ledger]
    num_rows: int
    max_tokens: int
    page_size: int | None = None

    def checks(self) -> list[Check]:
        """Every check of the suite, by name."""
        return ledger_checks(self.make, self.num_rows, self.max_tokens, self.page_size)


def ledger_checks(
    make: Callable[[], Ledger], num_rows: int, max_tokens: int, page_size: int | None = None
) -> list[Check]:
    """Every check of the suite, by name. `make` may give the same ledger each time: a check leaves
    it as it found it.

    `page_size` is the number of tokens that one entry of a page table stands for; None: a row is
    one page.
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

    def run(check: Callable[[Books], None]) -> None:
        check(Books(make(), num_rows, max_tokens))

    named: list[Check] = [(check.__name__, lambda check=check: run(check)) for check in checks]  # type: ignore[misc]
    machine = functools.partial(
        any_sequence_keeps_the_books, make, num_rows, max_tokens, page_size or max_tokens
    )
    return [*named, (any_sequence_keeps_the_books.__name__, machine)]


def example_checks(declared: str, part: str) -> list[Check]:
    """The suite for the ledger of an engine whose capability `ledger_example` is `declared`.

    A single check says why nothing can be checked, where its function gives no LedgerExample.
    """
    try:
        example = import_target(declared, f"ledger_example of {part}")()
        assert isinstance(example, LedgerExample), (
            f"{declared} returns {type(example).__name__}, not a LedgerExample"
        )
        return example.checks()
    except Exception as error:  # noqa: BLE001  # whatever a plugin's function raises is its case's verdict
        return [("ledger_example", functools.partial(_raise, error))]


def _raise(error: Exception) -> None:
    raise error


def everything_given_back_is_free_again(books: Books) -> None:
    """In whatever order the leases are released."""
    ledger = books.ledger
    free = ledger.num_free_tokens
    assert free >= books.max_tokens, (
        f"{free} tokens are free in an empty ledger of {books.max_tokens} a row"
    )
    for order in (1, -1):
        leases = books.admit_small()
        ledger.check()
        assert ledger.num_free_tokens < free, "admitting takes nothing"
        books.release(leases[::order])
        assert all(lease.released for lease in leases), "a released lease does not say so"
        ledger.check()
        assert ledger.num_free_tokens == free, (
            f"{free} tokens were free, now {ledger.num_free_tokens} are"
        )


def promises_never_exceed_what_is_free(books: Books) -> None:
    """Rows that want all they may have are admitted until there is no more, each at the cost of
    what it was promised.
    """
    ledger = books.ledger
    leases = []
    for row in range(books.num_rows):
        before = ledger.num_free_tokens
        lease = books.admit(row, books.max_tokens)
        ledger.check()
        if lease is None:
            assert before < books.max_tokens, f"row {row} is refused, and {before} tokens are free"
            if before > 0:  # what is said to be free can be promised
                leases.append(books.must_admit(row, before))
            break
        leases.append(lease)
        assert 0 <= ledger.num_free_tokens <= before - books.max_tokens, (
            f"{before} tokens were free before a promise of {books.max_tokens}, now "
            f"{ledger.num_free_tokens} are"
        )
    books.release(leases)


def refused_calls_change_nothing(books: Books) -> None:
    """More than a row can have is refused, and the row can still be admitted, or go on, as
    before.
    """
    ledger = books.ledger
    free = ledger.num_free_tokens
    assert books.admit(0, free + 1) is None, f"{free + 1} tokens are promised, {free} were free"
    ledger.check()
    assert ledger.num_free_tokens == free, "a refused admission takes something"
    lease = books.must_admit(0, 1)
    before = (ledger.num_free_tokens, dataclasses.astuple(lease), books.pages(lease))
    assert not ledger.reserve(lease, free + 1), (
        f"a row grows to {free + 1} tokens, {free} were free"
    )
    ledger.check()
    after = (ledger.num_free_tokens, dataclasses.astuple(lease), books.pages(lease))
    assert after == before, f"a refused reserve() changes {before} to {after}"
    books.release([lease])
    assert ledger.num_free_tokens == free


def reserve_grows_and_never_shrinks(books: Books) -> None:
    """A promise grows to what is asked, keeps its pages, and is not cut by asking for less."""
    lease = books.must_admit(0, 1)
    first = books.pages(lease)
    for num_tokens in (books.max_tokens // 2, books.max_tokens, 1):
        capacity = lease.capacity
        assert books.ledger.reserve(lease, num_tokens), (
            f"{num_tokens} tokens are refused to a row that is alone"
        )
        assert lease.capacity >= max(num_tokens, capacity), (
            f"a promise of {capacity} is {lease.capacity} after reserve({num_tokens})"
        )
        assert first <= books.pages(lease), "a row that grows loses pages that hold its tokens"
        books.ledger.check()
    books.release([lease])


def releasing_twice_is_refused(books: Books) -> None:
    """With InternalError, also when the row has a new lease by then, which stays."""
    old = books.must_admit(0, 1)
    books.release([old])
    free = books.ledger.num_free_tokens
    _assert_refuses_release(books, old)
    assert books.ledger.num_free_tokens == free, "a refused release gives something back"
    new = books.must_admit(0, 1)
    pages = books.pages(new)
    _assert_refuses_release(books, old)
    assert not new.released, "releasing an old lease of a row again releases its new one"
    assert books.pages(new) == pages, "releasing an old lease of a row again changes its new one"
    books.release([new])
    assert books.ledger.num_free_tokens == free


def _assert_refuses_release(books: Books, lease: Lease) -> None:
    try:
        books.ledger.release(lease)
    except InternalError:
        books.ledger.check()
    else:
        raise AssertionError("a lease can be released twice")


def tables_of_rows_do_not_overlap(books: Books) -> None:
    """Rows whose prompts share nothing share no page; a row admitted after another's release may
    take its pages.
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


def tables_hold_nothing_else(books: Books) -> None:
    """A table's row is its lease's pages and zeros, whatever was there, in the order of the
    leases.
    """
    leases = books.admit_small()
    written = books.tables(leases)
    for fill in (-1, 7):
        assert np.array_equal(books.tables(leases, fill), written), (
            f"a table that held {fill} still does"
        )
    assert np.array_equal(books.tables(leases[::-1]), written[:, ::-1]), (
        "rows are not in the order of the leases"
    )
    books.release(leases)


def a_row_that_is_alone_gets_the_most(books: Books) -> None:
    """max_tokens are promised to a row that is alone, at once and bit by bit, and not one more."""
    ledger = books.ledger
    most = books.max_tokens if ledger.max_tokens is None else ledger.max_tokens
    assert most >= books.max_tokens, (
        f"a row gets {most} of the {books.max_tokens} tokens that it should have"
    )
    for first in (1, most):
        lease = books.must_admit(0, first)
        assert ledger.reserve(lease, most), f"a row that is alone is refused {most} tokens"
        assert not ledger.reserve(lease, most + 1), (
            f"a row gets {most + 1} tokens, {most} are the most"
        )
        books.release([lease])
    assert books.admit(0, most + 1) is None, (
        f"a row is admitted with {most + 1} tokens, {most} are the most"
    )
