"""Steps that run in several parts, while the program of the whole step is not compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from enginebay.contracts.engine import Pending, RowPlan, StepPlan, TokenLogprobs


@dataclasses.dataclass(frozen=True)
class StepPart:
    """A part of a step as a step of its own. `places`: the index of each of its rows in the whole
    step.
    """

    plan: StepPlan
    places: tuple[int, ...]

    def split(self, parts: Sequence[StepPart]) -> list[StepPart]:
        """The parts of this part, as parts of the whole step."""
        at = self.places
        return [StepPart(part.plan, tuple(at[place] for place in part.places)) for part in parts]


def prefill_parts(plan: StepPlan, max_rows: int, max_tokens: int) -> list[StepPart]:
    """Split a prefill into prefills of at most these rows and tokens, in the order in which they
    run. A row that does not fit is computed in several chunks; the last one samples.
    """
    parts: list[list[tuple[int, RowPlan]]] = [[]]
    room = max_tokens
    for place, row in enumerate(plan.rows):
        done = 0
        while done < row.num_tokens:
            if room == 0 or len(parts[-1]) == max_rows:
                parts.append([])
                room = max_tokens
            count = min(room, row.num_tokens - done)
            is_last = done + count == row.num_tokens
            chunk = dataclasses.replace(
                row,
                num_computed=row.num_computed + done,
                num_tokens=count,
                samples=row.samples and is_last,
                update=row.update if is_last else (),
            )
            parts[-1].append((place, chunk))
            done += count
            room -= count
    return [_part(plan, part) for part in parts]


def decode_parts(plan: StepPlan, max_rows: int) -> list[StepPart]:
    """Split a decode or a verify step into steps of at most these rows."""
    rows = list(enumerate(plan.rows))
    return [_part(plan, rows[at : at + max_rows]) for at in range(0, len(rows), max_rows)]


def _part(plan: StepPlan, rows: Sequence[tuple[int, RowPlan]]) -> StepPart:
    own = dataclasses.replace(plan, rows=tuple(row for _, row in rows))
    return StepPart(own, tuple(place for place, _ in rows))


class PendingParts(Pending):
    """The results of a step that was launched in parts. A row's tokens are those of its last part;
    what a prefill returns for each token of a prompt is joined.
    """

    def __init__(self, parts: Sequence[StepPart], pending: Sequence[Pending]) -> None:
        """`pending`: the launched parts, in their order."""
        self._pending = tuple(pending)
        self._num_tokens = [sum(row.num_tokens for row in part.plan.rows) for part in parts]
        self._found: list[list[tuple[int, int]]] = []
        """For each row of the whole step, its places as (part, row of the part)."""
        for number, part in enumerate(parts):
            for row, place in enumerate(part.places):
                while len(self._found) <= place:
                    self._found.append([])
                self._found[place].append((number, row))
        self.bucket = self._pending[-1].bucket

    def read(self) -> np.ndarray:
        return self._of_last([one.read() for one in self._pending])

    def read_logprobs(self) -> TokenLogprobs:
        read = [one.read_logprobs() for one in self._pending]
        return TokenLogprobs(
            self._of_last([one.token_ids for one in read]),
            self._of_last([one.values for one in read]),
        )

    def _of_last(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """From an array [rows of the part, ...] of each part, the entries of the whole step's rows
        in their last part.
        """
        return np.stack([arrays[part][row] for *_, (part, row) in self._found])

    def read_all_logprobs(self, row: int) -> np.ndarray:
        part, own = self._found[row][-1]
        return self._pending[part].read_all_logprobs(own)

    def read_prompt_logprobs(self, row: int) -> TokenLogprobs:
        return TokenLogprobs.joined(
            [self._pending[part].read_prompt_logprobs(own) for part, own in self._found[row]]
        )

    def read_hidden(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        read = [self._pending[part].read_hidden(own) for part, own in self._found[row]]
        total = np.sum([total for total, _ in read], axis=0, dtype=np.float32)
        return total, read[-1][1]

    def read_logits(self) -> np.ndarray:
        each = zip(self._pending, self._num_tokens, strict=True)
        return np.concatenate([one.read_logits()[:count] for one, count in each])
