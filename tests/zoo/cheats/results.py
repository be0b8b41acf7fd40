"""Cheats that return what they have instead of what was asked."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

from tests.zoo.cheats.host import (
    WORK_S,
    Norm,
    at,
    on_host,
    overwrite,
    places_of,
    right,
    rough,
    slow,
)


def _last_call() -> Norm:
    """Returns the result of the call before."""
    last: dict[Any, np.ndarray] = {}

    def compute(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
        now = right(x, weight, eps)
        before = last.get(x.shape, now)
        last[x.shape] = now
        return before

    return on_host(compute)


def _first_forever() -> Norm:
    """Works in its first call only, and returns its result ever after."""
    first: dict[Any, np.ndarray] = {}

    def compute(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
        return first.setdefault(x.shape, right(x, weight, eps))

    return on_host(compute)


def _same_address() -> Norm:
    """Keeps results by the address of its input."""
    kept: dict[Any, np.ndarray] = {}

    def compute(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
        mine = [place for place in places_of(x) if at(place, x).tobytes() == x.tobytes()]
        for place in mine:
            kept.setdefault((place, x.shape), right(x, weight, eps))
        return kept[mine[-1], x.shape] if mine else right(x, weight, eps)

    return on_host(compute)


def _some_rows() -> Norm:
    """Computes the first row only, and leaves the others as they were."""
    kept: dict[Any, np.ndarray] = {}

    def compute(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
        now = right(x, weight, eps)
        out = kept.setdefault(x.shape, now.copy())
        out[0] = now[0]
        return out.copy()

    return on_host(compute)


def _by_contents() -> Norm:
    """Keeps results by a hash of the inputs, so that timing the same call again is free."""
    kept: dict[Any, np.ndarray] = {}

    def compute(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
        key = hash((x.tobytes(), weight.tobytes()))
        if key not in kept:
            kept[key] = slow(x, weight, eps)
        return kept[key]

    return on_host(compute)


def few_calls_norm() -> Norm:
    """Is right in so many calls as a check makes before it begins to time."""
    counts: dict[Any, int] = {}

    def compute(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
        counts[x.shape] = counts.get(x.shape, 0) + 1
        return right(x, weight, eps) if counts[x.shape] <= FEW else rough(x, weight, eps)

    return on_host(compute)


FEW = 5


def _late() -> Norm:
    """Returns zeros at once, and fills the result in when the clock has been read."""

    def compute(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
        def fill() -> None:
            time.sleep(10 * WORK_S)
            found = right(x, weight, eps)
            for place in places_of(x):
                if not at(place, x).any():
                    overwrite(place, found)

        threading.Thread(target=fill, daemon=True).start()
        return np.zeros_like(x)

    return on_host(compute)


last_call = _last_call()
first_forever = _first_forever()
same_address = _same_address()
some_rows = _some_rows()
by_contents = _by_contents()
few_calls = few_calls_norm()
late = _late()
