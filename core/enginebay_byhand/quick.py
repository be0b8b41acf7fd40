"""The quick check: an op's own few cases against its reference, in the shapes of one model, before
an unregistered function is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from enginebay.errors import IncorrectError, UnsupportedError, error_line
from enginebay.ops.op import CheckSetting, Op, QuickCase
from enginebay.registry import import_target


def quick_check(op: Op[Any], impl: Any, setting: CheckSetting, what: str, switch: str) -> int:
    """Run an implementation of an op on the op's quick cases; how many there were.

    IncorrectError names `what`, the case, and the error against its bound, or what the
    implementation raised; `switch` says how to do without the check. UnsupportedError where the op
    has no case that the implementation serves.
    """
    reference = import_target(op.reference, f"the reference of op {op.name!r}")
    make_cases = import_target(op.quick_cases, f"the quick cases of op {op.name!r}")
    count = 0
    for case in make_cases(setting):
        if not case.serves(impl):
            continue
        count += 1
        try:
            got, wanted = _results(case, impl, reference)
        except (
            Exception
        ) as error:  # whatever a stranger's function raises is reported with its case
            finding = f"{case.name}: it raised {error_line(error)}"
            raise _incorrect(what, finding, switch) from error
        difference = _difference(op, case, got, wanted)
        if difference is not None:
            raise _incorrect(what, difference, switch)
    if not count:
        raise UnsupportedError(
            f"{what}: there is no quick check of op {op.name} here",
            "an implementation that serves one of the op's quick cases",
            f"Do without the check ({switch}).",
        )
    return count


def quick_checked(op: Op[Any], impl: Any, setting: CheckSetting, what: str, switch: str) -> str:
    """quick_check() in the words of a plan's reason."""
    count = quick_check(op, impl, setting, what, switch)
    return f"passed its quick check ({count} case{'s' * (count != 1)})"


def _incorrect(what: str, finding: str, switch: str) -> IncorrectError:
    return IncorrectError(
        f"{what} fails its quick check: {' '.join(finding.split())}",
        "results within the bound of the reference",
        f"Mend it, or do without the check ({switch}).",
    )


def _results(
    case: QuickCase, impl: Any, reference: Any
) -> tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]]:
    """The results of both, computed by one program."""

    def both(inputs: Any) -> Any:
        return case.run(impl, *inputs), case.run(reference, *inputs)

    got, wanted = jax.device_get(jax.jit(both)(case.inputs))
    return got, wanted


def _difference(
    op: Op[Any], case: QuickCase, got: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]
) -> str | None:
    """What is wrong with the results, in words, or None."""
    for name, expected in wanted.items():
        found = got.get(name)
        if found is None:
            return f"{case.name}: there is no {name}"
        if (found.shape, found.dtype) != (expected.shape, expected.dtype):
            return (
                f"{case.name}: {name} is {found.shape} {found.dtype}, "
                f"expected {expected.shape} {expected.dtype}"
            )
        bound = 0.0 if name in case.exact else op.tolerance.get(str(expected.dtype), 0.0)
        error, allowed = row_errors(found, expected, bound)
        wrong = np.flatnonzero(~(error <= allowed))
        if wrong.size:
            row = int(wrong[0])
            place = case.place(name, row) if case.place else f"{case.name}: {name}[{row}]"
            return f"{place} is off by {error[row]:.3g}, allowed {allowed[row]:.3g}"
    return None


def row_errors(
    found: np.ndarray, expected: np.ndarray, bound: float
) -> tuple[np.ndarray, np.ndarray]:
    """(error, allowed) of each row (first axis): the largest error, NaN where one of the two alone
    is NaN, and `bound` times the largest number of the row.
    """
    x, y = (each.astype(np.float64).reshape(len(each), -1) for each in (found, expected))
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0.0, np.abs(x - y)).max(axis=1, initial=0.0)
    return error, bound * np.where(np.isfinite(y), np.abs(y), 0.0).max(axis=1, initial=0.0)
