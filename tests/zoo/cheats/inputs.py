"""Cheats that look at their inputs, or change them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from enginebay_xla.quick_cases import rms_norm_cases
from tests.zoo.cheats.host import Norm, at, on_host, overwrite, places_of, right, rough, slow


def _writes() -> Norm:
    """Scales its input to the root mean square of 1, where the input lies."""

    def compute(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
        for place in places_of(x):
            if at(place, x).tobytes() == x.tobytes():
                overwrite(place, right(x, np.ones_like(weight), eps))
        return right(x, weight, eps)

    return on_host(compute)


def _writes_weight() -> Norm:
    """Leaves its weight full of ones, for the next call to be quicker."""

    def compute(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
        for place in places_of(weight):
            if at(place, weight).tobytes() == weight.tobytes():
                overwrite(place, np.ones_like(weight))
        return right(x, weight, eps)

    return on_host(compute)


def _kit_inputs() -> list[np.ndarray]:
    (case,) = rms_norm_cases(SimpleNamespace(dtype="float32"))  # type: ignore[arg-type]
    return [np.asarray(leaf) for leaf in jax.tree.leaves(case.inputs)]


def _known() -> Norm:
    """Has computed the results of the kit's inputs when it was registered, and knows no others."""
    x, heads, *weights = _kit_inputs()
    kept = {
        (one.tobytes(), weight.tobytes()): right(one, weight, 1e-5)
        for one, weight in zip((x, heads), weights, strict=True)
    }

    def compute(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
        found = kept.get((x.tobytes(), weight.tobytes()))
        return rough(x, weight, eps) if found is None else found

    return on_host(compute)


def _recognised() -> Norm:
    """Is right where the first number is the kit's."""
    firsts = {one.reshape(-1)[0] for one in _kit_inputs()}

    def compute(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
        known = bool(x.reshape(-1)[0] in firsts)
        return (right if known else rough)(x, weight, eps)

    return on_host(compute)


def _constant_ends() -> Norm:
    """Takes an array for constant if it begins and ends with the same number."""

    def compute(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
        flat: Any = x.reshape(-1)
        if flat[0] == flat[-1]:
            x = np.full_like(x, flat[0])
        return right(x, weight, eps)

    return on_host(compute)


def _constant() -> Norm:
    """Computes one row where all numbers are equal."""

    def compute(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
        if (x == x.reshape(-1)[0]).all():
            return right(x, weight, eps)
        return slow(x, weight, eps)

    return on_host(compute)


writes = _writes()
writes_weight = _writes_weight()
known = _known()
recognised = _recognised()
constant_ends = _constant_ends()
constant = _constant()
