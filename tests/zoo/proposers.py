"""Faulty proposers: their drafts are no token ids, too many, or depend on more than the row."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from enginebay.contracts.proposer import Proposer
from enginebay_samplers.ngram import NgramOptions, NgramProposer
from enginebay_testing.proposers import proposer_checks

Check = tuple[str, Callable[[], None]]
Propose = Callable[[np.ndarray, int], Any]


class Faulty(Proposer):
    """A proposer that proposes by a function."""

    def __init__(self, propose: Propose) -> None:
        self._propose = propose

    def propose(self, token_ids: np.ndarray, most: int) -> Any:
        return self._propose(token_ids, most)


def last_tokens(token_ids: np.ndarray, most: int) -> np.ndarray:
    """The row's last tokens again: right drafts that each fault spoils."""
    return token_ids[-most:].astype(np.int32)


def spoilt(change: Callable[[np.ndarray], Any]) -> Callable[[], Proposer]:
    """A proposer of last tokens, changed by a function."""
    return lambda: Faulty(lambda row, most: change(last_tokens(row, most)))


def counted() -> Proposer:
    """Proposes other tokens each time."""
    counter = itertools.count()
    return Faulty(lambda *_: np.full(1, next(counter) % 8, np.int32))


def remembering() -> Proposer:
    """Goes on with the row that it was asked about before."""
    last: list[np.ndarray] = []

    def propose(row: np.ndarray, most: int) -> np.ndarray:
        last.append(row.copy())
        return last[-2][:1].astype(np.int32) if len(last) > 1 else np.empty(0, np.int32)

    return Faulty(propose)


def sorting(row: np.ndarray, most: int) -> np.ndarray:
    """Sorts the row that it is given."""
    row.sort()
    return row[:most].astype(np.int32)


def asking_for_two(row: np.ndarray, most: int) -> np.ndarray:
    """Reads the second last token of every row."""
    return np.full(1, row[-2], np.int32)


FAULTS: dict[str, Callable[[], Proposer]] = {
    "positions in place of tokens": lambda: Faulty(
        lambda row, most: np.arange(len(row), dtype=np.int32)[-most:]
    ),
    "tokens plus one": spoilt(lambda drafts: drafts + np.int32(1)),
    "lengths of the row": lambda: Faulty(lambda row, most: np.full(most, len(row), np.int32)),
    "padded with -1": spoilt(lambda drafts: np.append(drafts[:-1], np.int32(-1))),
    "of int64": spoilt(lambda drafts: drafts.astype(np.int64)),
    "of float32": spoilt(lambda drafts: drafts.astype(np.float32)),
    "a list": spoilt(lambda drafts: drafts.tolist()),
    "of two dimensions": spoilt(lambda drafts: drafts[None]),
    "nothing at all": lambda: Faulty(lambda *_: None),
    "one too many": lambda: Faulty(lambda row, most: np.resize(row, most + 1).astype(np.int32)),
    "the whole row": lambda: Faulty(lambda row, *_: row.astype(np.int32)),
    "other drafts each time": counted,
    "the row before": remembering,
    "a sorted row": lambda: Faulty(sorting),
    "no drafts for one token": lambda: Faulty(asking_for_two),
}

RIGHT: dict[str, Callable[[], Proposer]] = {
    "ngram": functools.partial(NgramProposer, NgramOptions()),
    "last tokens": lambda: Faulty(last_tokens),
}


def checks(part: Callable[[], Proposer]) -> list[Check]:
    """The kit's suite."""
    return proposer_checks(part)
