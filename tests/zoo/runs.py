"""What a check makes of a kernel: its first failing case, or that there is none."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from enginebay.compose.ops import usable_ops
from enginebay.ops.caps import Env
from enginebay.registry import Entry, load_registry
from enginebay_testing.op_kit import Extent, kit_of
from enginebay_testing.verdicts import FAULTS, judge
from tests.layouts import BUILTIN_LAYOUTS
from tests.zoo.faults import DEVICE_PACKAGES, Fault, planted, right_kernel

REGISTRY = load_registry()
OPS, _ = usable_ops(REGISTRY)


@dataclasses.dataclass(frozen=True)
class Finding:
    """What came of one fault. `default` and `all` say which check found it; `case` is the first
    that failed, after `cases` others.
    """

    name: str
    default: bool
    all: bool
    case: str = ""
    detail: str = ""
    cases: int = 0
    seconds: float = 0.0


def entry_of(op: str, package: str) -> Entry | None:
    """The registered kernel of an op in a package; None for a package that registers none."""
    entries = (e for e in REGISTRY.entries if e.declaration is not None)
    found = [e for e in entries if (e.kind, e.op, e.package) == ("kernel", op, package)]
    return found[-1] if found else None


def layouts_of(op: str, kernel: Any, package: str) -> list[Any]:
    """The layouts that a kernel is checked in."""
    if op == "attention":
        return [BUILTIN_LAYOUTS[name] for name in kernel.caps.layouts]
    entry = entry_of(op, package)
    declared = () if entry is None else tuple(entry.capability("layouts", ()))
    return [BUILTIN_LAYOUTS[name] for name in declared or BUILTIN_LAYOUTS]


def declared_extent(op: str, package: str, extent: Extent) -> Extent:
    """The extent with the forms of weights that the kernel of a package declares."""
    entry = entry_of(op, package)
    return extent if entry is None else extent.of(entry)


def find(fault: Fault, *, triples: bool = True) -> Finding:
    """Check a faulty kernel until its first failing case: pairs first, then with `triples` the
    others.
    """
    start = time.monotonic()
    kernel = planted(fault)
    package = _entry_point(fault.package)
    extent = Extent(triples=triples, interpreted=not fault.is_plain)
    count = 0
    for case in kit_of(REGISTRY, fault.op).cases(
        kernel,
        Env("cpu"),
        layouts_of(fault.op, kernel, package),
        declared_extent(fault.op, package, extent),
    ):
        outcome = judge(case.run)
        if outcome.verdict in FAULTS:
            seconds = round(time.monotonic() - start, 1)
            detail = f"{outcome.verdict}: {outcome.detail}"[:300]
            return Finding(fault.name, case.representative, True, case.name, detail, count, seconds)
        count += 1
    return Finding(
        fault.name,
        default=False,
        all=False,
        cases=count,
        seconds=round(time.monotonic() - start, 1),
    )


def wrong_verdicts(op: str, kernel: str, *, num_seeds: int) -> tuple[list[str], int]:
    """Cases that a right kernel fails in some of so many seeds, each with what it says, and how
    many cases there are.
    """
    package = kernel.partition(".")[0]
    made = right_kernel(kernel)
    extent = Extent(triples=False, interpreted=package in DEVICE_PACKAGES, num_seeds=num_seeds)
    found, count = [], 0
    layouts = layouts_of(op, made, _entry_point(package))
    extent = declared_extent(op, _entry_point(package), extent)
    for case in kit_of(REGISTRY, op).cases(made, Env("cpu"), layouts, extent):
        if not case.representative:
            continue
        outcome = judge(case.run)
        count += outcome.verdict == "PASS"
        if outcome.verdict in FAULTS:
            found.append(f"{case.name}: {outcome.verdict} {outcome.detail}")
    return found, count


def _entry_point(package: str) -> str:
    return package.removeprefix("enginebay_")
