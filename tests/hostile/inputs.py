"""Hostile inputs: strategies that make them, and the rule that each must keep.

An input is either served, or refused by an error of ours that is wrong input or not supported, in
one line of bounded length. Anything else is a fault: another exception, an error that asks for a
report, or an input that takes longer than LIMIT_S.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from enginebay.errors import InputError, UnsupportedError

LIMIT_S = 60
MAX_MESSAGE = 4000

EXTREMES: list[Any] = [
    0, -1, 1, 2, 7, 10**9, 2**31 - 1, 2**31, 2**63, 10**400, -(10**400), 1e308, -1e308, 1e-308,
    float("inf"), float("-inf"), float("nan"), "", "0", "auto", "none", "\x00", "x" * 5000, "a\nb",
    "{}", "../../etc/passwd", True, False, None, [], {}, [[]], [None], {"": None}, [0] * 200,
    ["x"] * 3, {"name": "x"}, {"options": 1},
]  # fmt: skip


def nested(depth: int, kind: type = list) -> Any:
    """A list or object that is nested this deep."""
    value: Any = 0
    for _ in range(depth):
        value = [value] if kind is list else {"a": value}
    return value


LEAVES = st.one_of(
    st.sampled_from(EXTREMES),
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
)
VALUES = st.one_of(
    LEAVES,
    st.recursive(
        LEAVES,
        lambda inner: (
            st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
        ),
        max_leaves=8,
    ),
    st.sampled_from([nested(30), nested(120), nested(120, dict)]),
)


def changed(base: dict[str, Any], more: tuple[str, ...] = ()) -> st.SearchStrategy[dict[str, Any]]:
    """`base` with up to four fields changed; one in ten times it lacks a field."""
    names = [*base, *more]
    changes = st.dictionaries(st.sampled_from(names), VALUES, min_size=1, max_size=4)
    lacking = st.sampled_from([None] * 9 * len(base) + list(base))
    return st.tuples(changes, lacking).map(
        lambda pair: {k: v for k, v in {**base, **pair[0]}.items() if k != pair[1]}
    )


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Fail when the block takes longer than LIMIT_S."""

    def expired(number: int, frame: object) -> None:
        raise TimeoutError(f"an input took more than {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, expired)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def is_refused(serve: Callable[[], object]) -> bool:
    """Whether an input is refused by one of the errors that it may be refused by."""
    try:
        with limited():
            serve()
    except (InputError, UnsupportedError) as error:
        message = str(error)
        assert len(message) < MAX_MESSAGE, (
            f"a message of {len(message)} characters: {message[:300]}"
        )
        return True
    return False


def hold(strategy: st.SearchStrategy[Any], examine: Callable[[Any], object], count: int) -> int:
    """Examine `count` inputs; returns how many were refused."""
    refused = 0

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def each(value: Any) -> None:
        nonlocal refused
        refused += is_refused(lambda: examine(value))

    each()
    return refused


def few_or_all(few: int, all_: int) -> Any:
    """A sample for `make test`, and all inputs for `make test-all`."""
    return pytest.mark.parametrize("count", [few, pytest.param(all_, marks=pytest.mark.slow)])
