"""Covering arrays have every pair or triple that may stand together, and nothing that may not."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from enginebay_testing.attention_values import ATTENTION
from enginebay_testing.covering import (
    PAIRS,
    TRIPLES,
    Combination,
    OpAxes,
    covering_rows,
    extreme_rows,
)
from enginebay_xla.kit import axes as axes_of_ops

AXES = {a.op: a for a in (ATTENTION, *vars(axes_of_ops).values()) if isinstance(a, OpAxes)}

SMALL = OpAxes(
    "small",
    {"a": (1, 2, 3), "b": ("x", "y"), "c": (False, True), "d": (None, 0.5, 2.5), "e": ()},
    never=(("a", 1, "b", "y"), ("c", True, "d", 0.5)),
)


def combinations(rows: list[Combination], strength: int) -> set[frozenset[tuple[str, object]]]:
    return {frozenset(c) for row in rows for c in itertools.combinations(row.items(), strength)}


def every_row(axes: OpAxes) -> list[Combination]:
    names = [axis for axis, values in axes.values.items() if values]
    rows = [
        dict(zip(names, values, strict=True))
        for values in itertools.product(*(axes.values[axis] for axis in names))
    ]
    return [r for r in rows if not any(r[a] == v and r[b] == w for a, v, b, w in axes.never)]


@pytest.mark.parametrize("strength", [PAIRS, TRIPLES])
def test_rows_have_all_combinations_and_no_other(strength: int) -> None:
    rows, possible = covering_rows(SMALL, strength), every_row(SMALL)
    assert combinations(rows, strength) == combinations(possible, strength)
    assert len(rows) < len(possible)
    assert all(row in possible for row in rows)


def test_values_that_nothing_goes_with_are_left_out() -> None:
    alone = SMALL.having(a=(1,), b=("y", "x"))
    assert {row["b"] for row in covering_rows(alone)} == {"x"}


def test_rows_are_the_same_on_every_call_and_name_axes_in_their_order() -> None:
    rows = covering_rows(dataclasses.replace(SMALL))
    assert rows == covering_rows(SMALL)
    assert list(rows[0]) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("op", sorted(AXES))
def test_every_pair_of_an_op_is_in_few_rows(op: str) -> None:
    axes = AXES[op].having(layout=("hnd", "nhd")) if "layout" in AXES[op].values else AXES[op]
    rows = covering_rows(axes)
    for (a, v), (b, w) in itertools.combinations(
        [(axis, value) for axis, values in axes.values.items() for value in values], 2
    ):
        never = {(a, v, b, w), (b, w, a, v)} & set(axes.never)
        if a != b and not never:
            assert any(row[a] == v and row[b] == w for row in rows), (a, v, b, w)
    assert len(rows) < 60


def test_the_axes_of_attention_are_those_that_its_problems_differ_in() -> None:
    wanted = {
        "phase",
        "dtype",
        "head_dim",
        "group",
        "kv_heads",
        "page",
        "layout",
        "window",
        "softcap",
    }
    wanted |= {"sinks", "scale", "lse", "rows", "context", "scores", "sharing", "padding", "config"}
    assert wanted <= ATTENTION.values.keys()


def test_extremes_have_ordinary_values_and_each_value_of_an_axis_that_is_named() -> None:
    axes = OpAxes(
        "op",
        {"size": (1, 2), "form": ("a", "b"), "way": ("x", "y")},
        never=(("form", "b", "way", "y"),),
        extremes=({"size": 99}, {"size": 98, "form": "b"}, {"size": 97, "form": "c"}),
        each=("form",),
    )
    assert extreme_rows(axes) == [
        {"size": 99, "form": "a", "way": "x"},
        {"size": 99, "form": "b", "way": "x"},
        {"size": 98, "form": "b", "way": "x"},
    ]
