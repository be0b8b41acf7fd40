"""The sampling parameters of rows as two host arrays, f32 and int32, with one column each."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np

from enginebay.types import ROW_VALUES, SamplingParams

if TYPE_CHECKING:
    import jax

Column = TypeVar("Column", "np.ndarray", "jax.Array")

FLOATS = tuple(name for name, one in ROW_VALUES.items() if one.dtype == "float32")
INTS = tuple(name for name, one in ROW_VALUES.items() if one.dtype == "int32")

_LIMITS = {
    names: (
        np.asarray([-np.inf if (low := ROW_VALUES[n].lowest) is None else low for n in names]),
        np.asarray([np.inf if (high := ROW_VALUES[n].highest) is None else high for n in names]),
    )
    for names in (FLOATS, INTS)
}
"""The lowest and the highest values of each column, float64."""


def neutral_columns(num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return f32 [num_rows, len(FLOATS)] and int32 [num_rows, len(INTS)] with neutral values."""
    floats = np.asarray([ROW_VALUES[name].neutral for name in FLOATS], np.float32)
    ints = np.asarray([ROW_VALUES[name].neutral for name in INTS], np.int32)
    return np.tile(floats, (num_rows, 1)), np.tile(ints, (num_rows, 1))


def by_name(floats: Column, ints: Column) -> dict[str, Column]:
    """Return the columns [rows] of both arrays (NumPy or JAX) by the name of the parameter."""
    return {name: floats[:, i] for i, name in enumerate(FLOATS)} | {
        name: ints[:, i] for i, name in enumerate(INTS)
    }


def write_row(floats: np.ndarray, ints: np.ndarray, params: SamplingParams) -> None:
    """Write a request's parameters into one row of each array, clipped to their limits."""
    floats[:] = np.clip([float(getattr(params, name)) for name in FLOATS], *_LIMITS[FLOATS])
    ints[:] = np.clip([float(getattr(params, name)) for name in INTS], *_LIMITS[INTS])
