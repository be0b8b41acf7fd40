"""Output that commands share: tables, progress on stderr, and reports of shadow mode."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from enginebay import waits
from enginebay.cli.waiting import shown_by

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from enginebay.shadow_report import ShadowReport


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Ctrl-C ends the block and sets the event, so that the caller prints the results so far."""
    stop = threading.Event()
    try:
        yield stop
    except KeyboardInterrupt:
        stop.set()
        print("\ninterrupted: these are the results so far", file=sys.stderr)


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a callback (what, done, total). A terminal shows progress bars; elsewhere work that
    takes longer than PATIENCE_S is reported as lines on stderr.

    On a terminal, waits (enginebay.waits) are shown as bars without an end.
    """
    if not sys.stderr.isatty():
        yield PlainProgress().report
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.table import Column

    columns = (
        TimeElapsedColumn(table_column=Column(min_width=7, no_wrap=True)),
        BarColumn(bar_width=12, table_column=Column(min_width=12)),
        TaskProgressColumn(table_column=Column(min_width=4)),
        TextColumn("{task.fields[count]}", table_column=Column(no_wrap=True)),
        TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
        TextColumn("{task.description}", table_column=Column(overflow="fold")),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total, count="")
            one, count = tasks[what], count_text(done, total)
            bars.update(one, completed=done, total=total, visible=done < total, count=count)

        with shown_by(WaitBars(bars)):
            yield report


def count_text(done: int, total: int) -> str:
    """Return "3 of 21"; megabytes for numbers that only bytes reach."""
    if total < 1_000_000:
        return f"{done} of {total}"
    return f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB"


@dataclasses.dataclass
class PlainProgress:
    """Progress without a terminal: one line for work that takes longer than PATIENCE_S, repeated
    every REPEAT_S.
    """

    next_s: dict[str, float] = dataclasses.field(default_factory=dict)

    def report(self, what: str, done: int, total: int) -> None:
        """Print the progress of `what`, if a line is due."""
        now_s = time.monotonic()
        if now_s > self.next_s.setdefault(what, now_s + waits.PATIENCE_S):
            self.next_s[what] = now_s + waits.REPEAT_S
            print(f"enginebay: {what}: {count_text(done, total)}", file=sys.stderr, flush=True)


class WaitBars(logging.Handler):
    """Shows waits as bars without an end, each until its wait ends."""

    def __init__(self, bars: Progress) -> None:
        super().__init__()
        self._bars = bars
        self._tasks: dict[object, TaskID] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Start or end a bar."""
        key, ended = record.__dict__.get("wait_key"), record.__dict__.get("wait_ended")
        if ended and key in self._tasks:
            self._bars.remove_task(self._tasks.pop(key))
        elif not ended and key not in self._tasks:
            self._tasks[key] = self._bars.add_task(
                record.getMessage().removesuffix(" ..."), total=None, count=""
            )


MAX_PLAIN_COLUMN = 40
"""Max width to which plain tables pad a column; a longer cell shifts the rest of its row."""


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    notes: Sequence[Sequence[str]] | None = None,
) -> None:
    """Print a table on stdout; `notes` are lines below each row.

    On a terminal the table fits the width and no word is cut. Elsewhere each row is one plain line,
    for `grep`, `awk` and `head`.
    """
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    widths = _column_widths([columns, *rows], width)
    for number, row in enumerate([columns, *rows]):
        cells = [
            [cell] if width is None else _wrapped(cell, n)
            for cell, n in zip(row, widths, strict=True)
        ]
        for line in itertools.zip_longest(*cells, fillvalue=""):
            print(
                "  ".join(text.ljust(one) for text, one in zip(line, widths, strict=True)).rstrip()
            )
        for note in notes[number - 1] if notes and number else ():
            wrapped = [note] if width is None else _wrapped(note, width - 6)
            print("\n".join([f"    {wrapped[0]}", *(f"      {line}" for line in wrapped[1:])]))


def _column_widths(rows: Sequence[Sequence[str]], width: int | None) -> list[int]:
    """Return column widths that fit into `width`; no column is narrower than its longest word."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if width is None:
        return [min(one, MAX_PLAIN_COLUMN) for one in widths]
    least = [
        max(len(w) for cell in column for w in cell.split() or [""])
        for column in zip(*rows, strict=True)
    ]
    while sum(widths) + 2 * (len(widths) - 1) > width:
        spare = [i for i in range(len(widths)) if widths[i] > least[i]]
        if not spare:
            break  # a table that is too wide is better than a name that is cut
        # Narrow a column that one long cell makes wide before a column in which every row would
        # wrap.
        widths[
            min(spare, key=lambda i: (sum(len(row[i]) >= widths[i] for row in rows), -widths[i]))
        ] -= 1
    return widths


def _wrapped(text: str, width: int) -> list[str]:
    if len(text) <= width:
        return [text]
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]


def print_shadow(report: ShadowReport | None) -> None:
    """Print the report of shadow mode on stderr, so that JSON on stdout stays valid. Print nothing
    without a shadow.
    """
    if report is not None:
        print("\n".join(shadow_lines(report)), file=sys.stderr)


def shadow_lines(report: ShadowReport) -> list[str]:
    """The report of shadow mode as lines of text."""
    lines = [f"shadow {report.op}={report.name}, on {report.share:g} of the steps:"]
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
            what = "layer" if report.op == "attention" else "call"
            lines.append(f"    largest difference in {what} {worst.layer} of {worst.group}")
            lines.append(
                f"    values that are NaN or infinite: {sum(m.num_nonfinite for m in mine)}"
            )
            lines.append(f"    tokens whose keys or values differ: {others}")
            timed = "attention" if report.op == "attention" else "all layers"
            lines.append(f"    {timed} of a step: {took:.3g} ms, chosen kernel {its:.3g} ms")
    if report.error is not None:
        lines.append(f"  failed in {report.num_failed} programs; first error: {report.error}")
    return lines
