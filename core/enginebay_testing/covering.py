"""The axes in which the problems of an op differ, and covering arrays: few rows of values that
contain every pair, or every triple, of values of different axes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping

import numpy as np

Value = str | int | float | bool | None
Combination = Mapping[str, Value]
"""A value for each axis."""


@dataclasses.dataclass(frozen=True)
class OpAxes:
    """The axes of one op by name, and the pairs of values that no problem has.

    `never` lists (axis, value, other axis, other value). `more` has further values of axes, which
    are checked with --all. `blocks` names the axes of sizes that kernels cut into blocks.

    `extremes` have ordinary values but for those given, such as a size that 16 bits do not hold;
    each is also checked with every other value of each axis in `each`, one at a time.
    """

    op: str
    values: Mapping[str, tuple[Value, ...]]
    never: tuple[tuple[str, Value, str, Value], ...] = ()
    more: Mapping[str, tuple[Value, ...]] = dataclasses.field(default_factory=dict)
    blocks: tuple[str, ...] = ()
    extremes: tuple[Combination, ...] = ()
    each: tuple[str, ...] = ()

    def known(self, axis: str) -> tuple[Value, ...]:
        """Return all values of an axis."""
        return (*self.values[axis], *self.more.get(axis, ()))

    def within(self, claims: Mapping[str, Callable[[Value], bool]]) -> OpAxes:
        """Return the axes with only those values that `claims` allows; axes without a claim stay
        unchanged.
        """
        kept = {
            axis: tuple(v for v in values if axis not in claims or claims[axis](v))
            for axis, values in self.values.items()
        }
        more = {
            axis: tuple(v for v in values if axis not in claims or claims[axis](v))
            for axis, values in self.more.items()
        }
        return dataclasses.replace(self, values=kept, more=more)

    def having(self, **values: tuple[Value, ...]) -> OpAxes:
        """Return the axes with other values of some axes, which then have no more values."""
        more = {axis: others for axis, others in self.more.items() if axis not in values}
        return dataclasses.replace(self, values={**self.values, **values}, more=more)


DTYPES = ("float32", "bfloat16", "float16")
PAIRS, TRIPLES = 2, 3

SHORT = 3
"""An axis with at most this many values is short: `added_rows` have all pairs with its values."""


def all_rows(axes: OpAxes, *, triples: bool) -> Iterator[tuple[Combination, bool]]:
    """Yield the rows of a check, and whether the default check has them: all pairs of values; with
    `triples` also rows with the values in `axes.more`, and all triples of the other values.
    """
    yield from ((row, True) for row in covering_rows(axes))
    if triples:
        yield from ((row, False) for row in added_rows(axes))
        yield from ((row, False) for row in covering_rows(axes, TRIPLES))


def added_rows(axes: OpAxes) -> list[Combination]:
    """Return rows that have every value in `axes.more`, with each value of each short axis."""
    known = {axis: axes.known(axis) for axis in axes.values}
    added = frozenset((axis, v) for axis, values in axes.more.items() for v in values)
    return _in_order(axes, known, PAIRS, added) if added else []


def extreme_rows(axes: OpAxes) -> list[Combination]:
    """Return the rows of `axes.extremes`, without those that name a value which an axis in
    `axes.each` does not have.
    """
    ordinary = {axis: values[0] for axis, values in axes.values.items() if values}
    rows: list[Combination] = []
    for extreme in axes.extremes:
        row = {axis: value for axis, value in {**ordinary, **extreme}.items() if axis in ordinary}
        free = [axis for axis in axes.each if axis not in extreme]
        others = [{**row, axis: v} for axis in free for v in axes.values[axis][1:]]
        rows += [one for one in (row, *others) if _is_possible(axes, one)]
    return rows


def _is_possible(axes: OpAxes, row: Combination) -> bool:
    has_values = all(row[axis] in axes.values[axis] for axis in axes.each if axis in row)
    return has_values and not any(
        (row.get(one), row.get(other)) == (value, second)
        for one, value, other, second in axes.never
    )


def covering_rows(axes: OpAxes, strength: int = PAIRS) -> list[Combination]:
    """Return rows of `axes` with every allowed pair (or triple) of values; every call returns the
    same rows.

    Greedy: each row starts with a missing combination, and then takes, axis by axis, the value that
    covers most. The first rows cover most. An axis without values is left out.
    """
    return _in_order(axes, axes.values, strength, frozenset())


def _in_order(
    axes: OpAxes,
    values: Mapping[str, tuple[Value, ...]],
    strength: int,
    added: frozenset[tuple[str, Value]],
) -> list[Combination]:
    """Return rows of `values` whose axes are in the order of `axes`."""
    by_size = sorted(values.items(), key=lambda item: -len(item[1]))
    known = tuple((axis, each) for axis, each in by_size if each)
    there = {(axis, value) for axis, each in known for value in each}
    never = tuple(n for n in axes.never if {(n[0], n[1]), (n[2], n[3])} <= there)
    names = [axis for axis in axes.values if values[axis]]
    return [{axis: row[axis] for axis in names} for row in _rows(known, never, strength, added)]


@functools.lru_cache(maxsize=32)
def _rows(
    known: tuple[tuple[str, tuple[Value, ...]], ...],
    never: tuple[tuple[str, Value, str, Value], ...],
    strength: int,
    added: frozenset[tuple[str, Value]],
) -> tuple[Mapping[str, Value], ...]:
    table = _Table(known, never)
    missing = table.combinations(strength)
    if added:
        missing &= table.pairs_of_added(added)
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

    def pairs_of_added(self, added: frozenset[tuple[str, Value]]) -> np.ndarray:
        """Return bool [values, values]: pairs of an added value and a value of a short axis."""
        axes = [self.axis_names[axis] for axis in self._axis.tolist()]
        is_added = np.array([pair in added for pair in zip(axes, self._values, strict=True)])
        is_short = np.bincount(self._axis)[self._axis] <= SHORT
        pairs = is_added[:, None] & is_short[None]
        return np.asarray(pairs | pairs.T)

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
