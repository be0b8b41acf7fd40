"""Axes, in which the problems of an op differ, and covering arrays of them: few rows of values in
which every pair, or every triple, of values of different axes occurs.
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
    """The axes of one op, by name, and the pairs of values that no problem has.

    `never` lists (axis, value, other axis, other value).
    """

    op: str
    values: Mapping[str, tuple[Value, ...]]
    never: tuple[tuple[str, Value, str, Value], ...] = ()

    def within(self, claims: Mapping[str, Callable[[Value], bool]]) -> OpAxes:
        """The same with those values alone that `claims` allows, by axis; axes without a claim stay
        as they are.
        """
        kept = {
            axis: tuple(v for v in values if axis not in claims or claims[axis](v))
            for axis, values in self.values.items()
        }
        return dataclasses.replace(self, values=kept)

    def having(self, **values: tuple[Value, ...]) -> OpAxes:
        """The same with other values of some axes."""
        return dataclasses.replace(self, values={**self.values, **values})


DTYPES = ("float32", "bfloat16", "float16")
PAIRS, TRIPLES = 2, 3


def covering_rows(axes: OpAxes, strength: int = PAIRS) -> list[Combination]:
    """Rows of `axes` with every pair (or triple) of values that may stand together; the same rows
    on every call.

    Greedy: each row begins with a combination that is missing, then takes, axis by axis, the value
    that adds most. The first rows cover most. An axis without values is left out.
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
        if row is None:  # no problem has these values
            for order in itertools.permutations(first):
                missing[order] = False
            continue
        missing[np.ix_(*[np.array(row)] * strength)] = False
        rows.append({table.axis_names[axis]: table.value(i) for axis, i in enumerate(row)})
    return tuple(rows)


class _Table:
    """Values of all axes, numbered one after the other, and which may stand in one row."""

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
        """bool [values] * strength: the combinations that a row may have."""
        two = self._together
        if strength == PAIRS:
            return two.copy()
        return two[:, :, None] & two[:, None, :] & two[None]

    def row_with(self, first: tuple[int, ...], missing: np.ndarray) -> list[int] | None:
        """A row with the values `first`, and of the other axes those that add most, axis by axis;
        None when there is none.
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
        """Whether every axis has a value that is `free` (bool [values]), or is in `done`."""
        return len(done | set(self._axis[free].tolist())) == len(self.axis_names)
