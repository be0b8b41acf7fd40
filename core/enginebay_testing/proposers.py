"""Conformance suite of the proposer contract: any registered proposer, on random, repeating and
short rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from enginebay.proposer import Proposer

VOCAB_SIZE, MOST, FAR = 8, 6, 100


def proposer_checks(make: Callable[[], Proposer]) -> list[tuple[str, Callable[[], None]]]:
    """Every check of the suite, by name; `make` gives a fresh proposer."""
    checks = (drafts_are_few_tokens, equal_rows_get_equal_drafts, rows_are_left_as_they_are)
    return [(check.__name__, functools.partial(check, make)) for check in checks]


def _rows() -> list[np.ndarray]:
    """Rows of one token and more, some of which repeat themselves."""
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, VOCAB_SIZE, length) for length in (1, 2, 3, 5, 17, 64, 400)]
    return [row.astype(np.int32) for row in [*rows, *(np.resize(row, 50) for row in rows[:5])]]


def drafts_are_few_tokens(make: Callable[[], Proposer]) -> None:
    """At most as many as were requested, one-dimensional, of dtype int32, and tokens of the
    vocabulary.

    A proposer knows the vocabulary by the rows alone: all its tokens are in them.
    """
    proposer = make()
    for row in _rows():
        for most in (*range(1, MOST + 1), *([FAR] if proposer.looks_far else [])):
            drafts = proposer.propose(row, most)
            case = f"{most} tokens after {len(row)}: {drafts!r}"
            assert isinstance(drafts, np.ndarray), case
            assert drafts.dtype == np.int32, case
            assert drafts.ndim == 1, case
            assert len(drafts) <= most, case
            are_tokens = (drafts >= 0) & (drafts < VOCAB_SIZE)
            assert are_tokens.all(), (
                f"{case}: no tokens of a vocabulary of {VOCAB_SIZE}, which the rows show"
            )


def equal_rows_get_equal_drafts(make: Callable[[], Proposer]) -> None:
    """Whatever was asked before: of other rows, or of a longer or shorter beginning of the same."""
    asked = [row[:length] for row in _rows() for length in {1, len(row) // 2, len(row)} if length]
    used = make()
    for row in asked:
        used.propose(row, MOST)
    for row in reversed(asked):
        again, fresh = used.propose(row, MOST), make().propose(row, MOST)
        assert np.array_equal(again, fresh), (
            f"{row!r} gets {again!r}, and from a new proposer {fresh!r}"
        )


def rows_are_left_as_they_are(make: Callable[[], Proposer]) -> None:
    """The tokens belong to the loop: a proposer can do with an array that cannot be written to."""
    proposer = make()
    for row in _rows():
        before = row.copy()
        row.flags.writeable = False
        proposer.propose(row, MOST)
        assert np.array_equal(row, before), f"{before!r} became {row!r}"
