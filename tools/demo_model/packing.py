"""Packs documents into rows of equal length for training and evaluation."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

import demo_tokenizer as dt

Document = tuple[list[int], list[float]]
_OPEN_ROWS = 64
_LEADING_END_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Rows:
    """Packed rows, each array [rows, length + 1]: tokens, loss weights and the number of the
    document in its row.
    """

    tokens: np.ndarray
    weights: np.ndarray
    segments: np.ndarray

    def take(self, index: np.ndarray) -> "Rows":
        """The rows at the given indices."""
        return Rows(self.tokens[index], self.weights[index], self.segments[index])


def _fill(rows: Sequence[Sequence[Document]], length: int, *, separate: bool) -> Rows:
    """Lay each row's documents one after another and pad the rest."""
    shape = (len(rows), length)
    tokens = np.full(shape, dt.PAD_ID, np.int32)
    weights, segments = np.zeros(shape, np.float32), np.zeros(shape, np.int32)
    for number, row in enumerate(rows):
        start = 0
        for segment, (ids, values) in enumerate(row):
            end = start + len(ids)
            tokens[number, start:end] = ids
            weights[number, start:end] = values
            if separate:
                segments[number, start:end] = segment
                weights[number, start] = 0.0
            start = end
        segments[number, start:] = len(row) if separate else 0
    return Rows(tokens, weights, segments)


def pack(documents: Sequence[Document], length: int, *, separate: bool) -> Rows:
    """First fit over a window of open rows. With `separate`, a document cannot see the others in
    its row.
    """
    done: list[list[Document]] = []
    open_rows: list[tuple[int, list[Document]]] = []
    for document in documents:
        size = len(document[0])
        for slot, (used, row) in enumerate(open_rows):
            if used + size <= length + 1:
                row.append(document)
                open_rows[slot] = (used + size, row)
                break
        else:
            open_rows.append((size, [document]))
        if len(open_rows) > _OPEN_ROWS:
            fullest = max(range(len(open_rows)), key=lambda slot: open_rows[slot][0])
            done.append(open_rows.pop(fullest)[1])
    done += [row for _, row in open_rows]
    return _fill(done, length + 1, separate=separate)


def pack_training(
    documents: Sequence[Document], seed: int, short: int, long: int
) -> tuple[Rows, Rows]:
    """Short rows with separate documents, and long rows with the documents that only fit there.

    A quarter of the documents in short rows begin with the end-of-text token, so that the model is
    at home both with and without a token in front of the prompt. Long rows let a document see the
    one before, so that the model also learns to go on after the end of a text.
    """
    rng = random.Random(seed)
    shuffled = list(documents)
    rng.shuffle(shuffled)
    brief: list[Document] = []
    extended: list[Document] = []
    for ids, weights in shuffled:
        if rng.random() < _LEADING_END_SHARE:
            ids, weights = [dt.END_OF_TEXT_ID, *ids], [0.0, *weights]
        if len(ids) <= short + 1:
            brief.append((ids, weights))
        elif len(ids) <= long + 1:
            extended.append((ids, weights))
    fillers = len(extended) // 2
    extended += brief[:fillers]
    rng.shuffle(extended)
    return pack(brief[fillers:], short, separate=True), pack(extended, long, separate=False)


def batches(rows: Rows, size: int, seed: int) -> Iterator[Rows]:
    """Endless batches of `size` rows, in a new order on each pass."""
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(len(rows.tokens))
        for start in range(0, len(order) - size + 1, size):
            yield rows.take(order[start : start + size])
