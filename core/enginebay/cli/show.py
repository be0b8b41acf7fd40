"""Progress on stderr, for people only: nothing is shown when stderr is not a terminal. And what a shadow found."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from enginebay.ops.shadow import ShadowReport


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], None] | None]:
    """A callback (what, done, total) that draws a bar, or None when nobody watches."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress, TaskID

    with Progress(console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield report


def print_shadow(report: ShadowReport | None, where: str = "") -> None:
    """The report of shadow mode on stderr, where JSON on stdout is left alone; nothing without a shadow."""
    if report is None:
        return
    lines = [f"shadow {report.op}={report.name}{where}, on {report.share:g} of the steps:"]
    for phase in report.phases:
        counts = f"{phase.num_compared} of {phase.num_steps} steps compared"
        lines.append(f"  {phase.phase}: {counts} with {phase.chosen}")
        worst = report.worst(phase.phase)
        if worst is not None:
            mine = [layer for layer in report.layers if layer.phase == phase.phase]
            off, relative = max(m.absolute for m in mine), max(m.relative for m in mine)
            others = sum(m.num_cache_differences for m in mine)
            took, its = phase.candidate_s * 1e3, phase.chosen_s * 1e3
            lines.append(f"    largest difference {off:.3g}, relative {relative:.3g}")
            lines.append(f"    furthest off is layer {worst.layer} of {worst.group}")
            lines.append(f"    values that are not finite: {sum(m.num_nonfinite for m in mine)}")
            lines.append(f"    tokens with other keys or values: {others}")
            lines.append(f"    attention of a step: {took:.3g} ms, the chosen one {its:.3g} ms")
    if report.error is not None:
        lines.append(f"  failed on {report.num_failed} programs, first {report.error}")
    print("\n".join(lines), file=sys.stderr)
