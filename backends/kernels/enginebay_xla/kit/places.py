"""Names the places of wrong numbers, and their likely causes, for the checks of the plain ops."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

from enginebay_testing.exact import hold
from enginebay_testing.oracle import EPS
from enginebay_testing.verdicts import expect


def hold_rows(
    error: np.ndarray,
    allowed: np.ndarray,
    what: str,
    numbers: np.ndarray,
    *,
    rms: float | None = None,
    causes: str = "",
) -> None:
    """Hold errors [rows, ...] of the rows `numbers`; the message names row and output."""
    bad = np.argwhere(~(error <= allowed).reshape(len(error), math.prod(error.shape[1:])))
    place = ""
    if bad.size:
        place = f"row {int(numbers[bad[0, 0]])}, output {int(bad[0, 1])}{causes}"
    hold(error, allowed, what, rms=rms, place=place)


def causes_of(
    got: np.ndarray, expected: np.ndarray, allowed: np.ndarray, without_bias: np.ndarray | None
) -> str:
    """Return words about the likely cause of wrong rows, or "": the bias is missing, or a row has
    the result of another one.
    """
    flat = [a.reshape(len(a), math.prod(a.shape[1:])) for a in (got, expected, allowed)]
    wrong = np.flatnonzero(~(np.abs(flat[0] - flat[1]) <= flat[2]).all(axis=1))
    if not wrong.size:
        return ""
    row = int(wrong[0])
    mine, bound = flat[0][row], flat[2][row]
    if without_bias is not None:
        plain = without_bias.reshape(flat[0].shape)[row]
        if (np.abs(mine - plain) <= bound + EPS["float32"]).all():
            return " (the bias is missing)"
    if not np.isfinite(mine).all():
        return " (it is not finite)"
    if not mine.any():
        return " (all its outputs are 0)"
    same = np.flatnonzero((np.abs(flat[1] - mine) <= np.maximum(flat[2], bound)).all(axis=1))
    return f" (it has the result of finite row {int(same[0])})" if same.size else ""


def hold_copies(got: np.ndarray, table: np.ndarray, ids: np.ndarray) -> None:
    """Raise AssertionError unless row i of `got` has the bits of row ids[i] of the table. A zero
    may stand for a subnormal number: TPUs and vector instructions flush them.
    """
    bits = f"u{table.dtype.itemsize}"
    found, wanted = got.view(bits), table[ids].view(bits)
    is_flushed = (got == 0) & (np.abs(table[ids]) < ml_dtypes.finfo(table.dtype).smallest_normal)
    bad = np.argwhere((found != wanted) & ~(is_flushed & (table[ids] != 0)))
    if not bad.size:
        return
    row, feature = (int(i) for i in bad[0])
    same = np.flatnonzero((table.view(bits) == found[row]).all(axis=1))
    cause = f"; it is the table's row {int(same[0])}" if same.size else ""
    expect(
        False,
        f"row {row}, feature {feature}: {got[row, feature]}, where the table's row "
        f"{int(ids[row])} has {table[ids[row], feature]}{cause}",
    )
