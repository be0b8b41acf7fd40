"""What a check makes of a kernel: its first failing case, or that there is none."""

from __future__ import annotations

import dataclasses
import time
from typing import Any, cast

from enginebay.compose.ops import usable_ops
from enginebay.ops.caps import Env
from enginebay.plugins.registry import Entry, load_registry
from enginebay_testing.op_kit import CaseBudget, kit_of
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


@dataclasses.dataclass(frozen=True)
class Told:
    """What stands in place of a registered kernel for one that is not registered: the capabilities
    that the kernel's own attribute `capabilities` lists.
    """

    kernel: Any

    def capability(self, name: str, default: Any = None) -> Any:
        """As `Entry.capability`."""
        return getattr(self.kernel, "capabilities", {}).get(name, default)


def declared(op: str, kernel: Any, package: str) -> Entry:
    """What says which capabilities a kernel has: its registration, or the kernel itself."""
    return entry_of(op, package) or cast("Entry", Told(kernel))


def layouts_of(op: str, kernel: Any, package: str) -> list[Any]:
    """The layouts that a kernel is checked in."""
    if op == "attention":
        return [BUILTIN_LAYOUTS[name] for name in kernel.caps.layouts]
    names = tuple(declared(op, kernel, package).capability("layouts", ()))
    return [BUILTIN_LAYOUTS[name] for name in names or BUILTIN_LAYOUTS]


def find(fault: Fault, *, triples: bool = True) -> Finding:
    """Check a faulty kernel until its first failing case: pairs first, then with `triples` the
    others.
    """
    start = time.monotonic()
    kernel = planted(fault)
    package = _entry_point(fault.package)
    extent = CaseBudget(triples=triples, interpreted=not fault.is_plain)
    count = 0
    for case in kit_of(REGISTRY, fault.op).cases(
        kernel,
        Env("cpu"),
        layouts_of(fault.op, kernel, package),
        extent.of(declared(fault.op, kernel, package)),
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


@dataclasses.dataclass(frozen=True)
class RightFinding:
    """What came of a right kernel: cases that passed, cases that it does not claim, and those that
    failed in some of the seeds, each with what it says. `seconds` are of the CPU.
    """

    op: str
    kernel: str
    seeds: int
    passed: int
    unsupported: int
    failed: tuple[str, ...]
    seconds: float


def check_right(op: str, kernel: str, *, num_seeds: int, triples: bool = False) -> RightFinding:
    """Run the cases of a right kernel, with `triples` all of them."""
    package = kernel.partition(".")[0]
    made, start = right_kernel(kernel), time.process_time()
    extent = CaseBudget(
        triples=triples, interpreted=package in DEVICE_PACKAGES, num_seeds=num_seeds
    )
    layouts = layouts_of(op, made, _entry_point(package))
    extent = extent.of(declared(op, made, _entry_point(package)))
    failed, passed, unsupported = [], 0, 0
    for case in kit_of(REGISTRY, op).cases(made, Env("cpu"), layouts, extent):
        if not (case.representative or triples):
            continue
        outcome = judge(case.run)
        passed += outcome.verdict == "PASS"
        unsupported += outcome.verdict == "UNSUPPORTED"
        if outcome.verdict in FAULTS:
            failed.append(f"{case.name}: {outcome.verdict} {outcome.detail}"[:500])
    seconds = round(time.process_time() - start, 1)
    return RightFinding(op, kernel, num_seeds, passed, unsupported, tuple(failed), seconds)


def _entry_point(package: str) -> str:
    return package.removeprefix("enginebay_")
