"""The quick check of an unregistered function: a few cases of its op in the shapes of one model,
compared with the op's reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from enginebay.compose.quick_cases import CheckSetting, QuickCase
from enginebay.errors import IncorrectError, UnsupportedError, error_line
from enginebay.ops.op import Op
from enginebay.plugins.registry import import_target


def quick_check(op: Op[Any], impl: Any, setting: CheckSetting, what: str, switch: str) -> int:
    """Run an implementation on the quick cases of its op, and return the number of cases.

    IncorrectError names `what`, the case, and the error with its bound, or the exception of the
    implementation; `switch` says how to skip the check. UnsupportedError when the implementation
    serves none of the op's cases.
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
        except Exception as error:  # any exception of the function is reported with its case
            finding = f"{case.name}: it raised {error_line(error)}"
            raise _incorrect(what, finding, switch) from error
        difference = why_different(op, case, got, wanted)
        if difference is not None:
            raise _incorrect(what, difference, switch)
    if not count:
        raise UnsupportedError(
            f"{what}: there is no quick check of op {op.name} here",
            "an implementation that serves one of the op's quick cases",
            f"Skip the check ({switch}).",
        )
    return count


def quick_checked(op: Op[Any], impl: Any, setting: CheckSetting, what: str, switch: str) -> str:
    """Run quick_check() and return a text for `enginebay explain`, such as "passed its quick check
    (3 cases)".
    """
    count = quick_check(op, impl, setting, what, switch)
    return f"passed its quick check ({count} case{'s' * (count != 1)})"


def _incorrect(what: str, finding: str, switch: str) -> IncorrectError:
    return IncorrectError(
        f"{what} fails its quick check: {' '.join(finding.split())}",
        "results within the bound of the reference",
        f"Fix the function, or skip the check ({switch}).",
    )


def _results(
    case: QuickCase, impl: Any, reference: Any
) -> tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]]:
    """Return the results of the reference and of the implementation, computed by one program."""

    def both(inputs: Any) -> Any:
        return case.run(impl, *inputs), case.run(reference, *inputs)

    got, wanted = jax.device_get(jax.jit(both)(case.inputs))
    return got, wanted


def why_different(
    op: Op[Any], case: QuickCase, got: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]
) -> str | None:
    """Describe the first wrong result of a case, or return None."""
    for name, expected in wanted.items():
        found = got.get(name)
        if found is None:
            return f"{case.name}: the result {name} is missing"
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
    """Return (error, allowed) of each row (axis 0): the largest error, NaN where exactly one of the
    two values is NaN, and `bound` times the largest number of the row.
    """
    x, y = (each.astype(np.float64).reshape(len(each), -1) for each in (found, expected))
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0.0, np.abs(x - y)).max(axis=1, initial=0.0)
    return error, bound * np.where(np.isfinite(y), np.abs(y), 0.0).max(axis=1, initial=0.0)
