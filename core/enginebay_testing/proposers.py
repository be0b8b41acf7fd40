"""Conformance suite of proposers, on random, repeating and short rows."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from enginebay.contracts.proposer import Proposer

VOCAB_SIZE, MOST, FAR = 8, 6, 100


def proposer_checks(make: Callable[[], Proposer]) -> list[tuple[str, Callable[[], None]]]:
    """Return every check of the suite, by name; `make` makes a new proposer."""
    checks = (drafts_are_few_tokens, equal_rows_get_equal_drafts, rows_are_left_as_they_are)
    return [(check.__name__, functools.partial(check, make)) for check in checks]


def _rows() -> list[np.ndarray]:
    """Return rows of one token and more, some with repetitions."""
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, VOCAB_SIZE, length) for length in (1, 2, 3, 5, 17, 64, 400)]
    return [row.astype(np.int32) for row in [*rows, *(np.resize(row, 50) for row in rows[:5])]]


def drafts_are_few_tokens(make: Callable[[], Proposer]) -> None:
    """Drafts are at most as many tokens as requested: one-dimensional, int32, and in the
    vocabulary.

    The rows contain every token of the vocabulary that a proposer may know.
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
                f"{case}: a token is outside the vocabulary of {VOCAB_SIZE} tokens"
            )


def equal_rows_get_equal_drafts(make: Callable[[], Proposer]) -> None:
    """Equal rows get equal drafts, whatever the proposer was asked before."""
    asked = [row[:length] for row in _rows() for length in {1, len(row) // 2, len(row)} if length]
    used = make()
    for row in asked:
        used.propose(row, MOST)
    for row in reversed(asked):
        again, fresh = used.propose(row, MOST), make().propose(row, MOST)
        assert np.array_equal(again, fresh), (
            f"{row!r} gets {again!r}, but a new proposer drafts {fresh!r}"
        )


def rows_are_left_as_they_are(make: Callable[[], Proposer]) -> None:
    """propose() works on a read-only array and does not change it."""
    proposer = make()
    for row in _rows():
        before = row.copy()
        row.flags.writeable = False
        proposer.propose(row, MOST)
        assert np.array_equal(row, before), f"propose() changed {before!r} to {row!r}"
