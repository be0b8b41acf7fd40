"""The axes in which the problems of an op differ, and covering arrays: few rows of values that
contain every pair, or every triple, of values of different axes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping

import numpy as np

Value = str | int | float | bool | None
Combination = Mapping[str, Value]
"""A value for each axis."""


@dataclasses.dataclass(frozen=True)
class OpAxes:
    """The axes of one op by name, and the pairs of values that no problem has.

    `never` lists (axis, value, other axis, other value).
    """

    op: str
    values: Mapping[str, tuple[Value, ...]]
    never: tuple[tuple[str, Value, str, Value], ...] = ()

    def within(self, claims: Mapping[str, Callable[[Value], bool]]) -> OpAxes:
        """Return the axes with only those values that `claims` allows; axes without a claim stay
        unchanged.
        """
        kept = {
            axis: tuple(v for v in values if axis not in claims or claims[axis](v))
            for axis, values in self.values.items()
        }
        return dataclasses.replace(self, values=kept)

    def having(self, **values: tuple[Value, ...]) -> OpAxes:
        """Return the axes with other values of some axes."""
        return dataclasses.replace(self, values={**self.values, **values})


DTYPES = ("float32", "bfloat16", "float16")
PAIRS, TRIPLES = 2, 3


def covering_rows(axes: OpAxes, strength: int = PAIRS) -> list[Combination]:
    """Return rows of `axes` with every allowed pair (or triple) of values; every call returns the
    same rows.

    Greedy: each row starts with a missing combination, and then takes, axis by axis, the value that
    covers most. The first rows cover most. An axis without values is left out.
    """
    by_size = sorted(axes.values.items(), key=lambda item: -len(item[1]))
    known = tuple((axis, values) for axis, values in by_size if values)
    there = {(axis, value) for axis, values in known for value in values}
    never = tuple(n for n in axes.never if {(n[0], n[1]), (n[2], n[3])} <= there)
    names = [axis for axis in axes.values if axes.values[axis]]
    return [{axis: row[axis] for axis in names} for row in _rows(known, never, strength)]


@functools.lru_cache(maxsize=32)
def _rows(
    known: tuple[tuple[str, tuple[Value, ...]], ...],
    never: tuple[tuple[str, Value, str, Value], ...],
    strength: int,
) -> tuple[Mapping[str, Value], ...]:
    table = _Table(known, never)
    missing = table.combinations(strength)
    rows = []
    while missing.any():
        first = tuple(int(i) for i in np.argwhere(missing)[0])
        row = table.row_with(first, missing)
        if row is None:  # no problem has this combination of values
            for order in itertools.permutations(first):
                missing[order] = False
            continue
        missing[np.ix_(*[np.array(row)] * strength)] = False
        rows.append({table.axis_names[axis]: table.value(i) for axis, i in enumerate(row)})
    return tuple(rows)


class _Table:
    """The numbered values of all axes, and which of them may occur in one row."""

    def __init__(
        self,
        known: tuple[tuple[str, tuple[Value, ...]], ...],
        never: tuple[tuple[str, Value, str, Value], ...],
    ) -> None:
        self.axis_names = [axis for axis, _ in known]
        self._values = [value for _, values in known for value in values]
        self._axis = np.repeat(np.arange(len(known)), [len(values) for _, values in known])
        self._together = self._axis[:, None] != self._axis[None]
        for one, value, other, second in never:
            i, j = self._number(one, value), self._number(other, second)
            self._together[i, j] = self._together[j, i] = False

    def _number(self, axis: str, value: Value) -> int:
        at = self.axis_names.index(axis)
        return next(
            i for i in np.flatnonzero(self._axis == at).tolist() if self._values[i] == value
        )

    def value(self, number: int) -> Value:
        return self._values[number]

    def combinations(self, strength: int) -> np.ndarray:
        """Return bool [values] * strength: the combinations that a row may have."""
        two = self._together
        if strength == PAIRS:
            return two.copy()
        return two[:, :, None] & two[:, None, :] & two[None]

    def row_with(self, first: tuple[int, ...], missing: np.ndarray) -> list[int] | None:
        """Return a row with the values `first` and, axis by axis, the other values that cover most;
        None if there is no such row.
        """
        chosen = {int(self._axis[i]): i for i in first}
        for axis in range(len(self.axis_names)):
            if axis in chosen:
                continue
            others = np.array(list(chosen.values()))
            free = self._together[others].all(axis=0)
            able = [
                i
                for i in np.flatnonzero(free & (self._axis == axis)).tolist()
                if self._leaves_values(free & self._together[i], {axis, *chosen})
            ]
            if not able:
                return None
            at = np.ix_(*[others] * (missing.ndim - 1))
            chosen[axis] = max(able, key=lambda i: int(missing[i][at].sum()))
        return [chosen[axis] for axis in range(len(self.axis_names))]

    def _leaves_values(self, free: np.ndarray, done: set[int]) -> bool:
        """Return whether every axis has a value that is `free` (bool [values]) or in `done`."""
        return len(done | set(self._axis[free].tolist())) == len(self.axis_names)
