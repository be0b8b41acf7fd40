"""A comparison as text: a plain table, Markdown, CSV or JSON."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import re
from collections.abc import Sequence
from typing import Any

from enginebay_bench.compare.comparison import FIGURES, ComparedRow, Comparison
from enginebay_bench.compare.records import Cell
from enginebay_bench.compare.statistics import Interval, Spread


def figure_text(value: float) -> str:
    """A figure with three or four digits."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def spread_text(value: Spread) -> str:
    """A median with its quartiles."""
    return f"{figure_text(value.median)} ({figure_text(value.low)} to {figure_text(value.high)})"


def interval_text(value: Interval) -> str:
    """A ratio with its interval."""
    if value.low is None or value.high is None:
        return f"{value.ratio:.3f} (too few rounds)"
    return f"{value.ratio:.3f} ({value.low:.3f} to {value.high:.3f})"


def shown_ratio(row: ComparedRow, figure: str, reference: str) -> str:
    """The ratio of a row's speed to the reference's, or why there is none."""
    if row.variant == reference:
        return "reference"
    if not row.parity.is_right:
        return f"not ranked: {row.parity.verdict}"
    if row.other_work:
        return f"not comparable: {row.other_work}"
    found = row.ratios.get(figure)
    return "-" if found is None else interval_text(found)


def figures_shown(comparison: Comparison, cell: Cell) -> list[str]:
    """The figures that any row of a cell has."""
    rows = [row for row in comparison.rows if row.cell == cell]
    return [name for name in FIGURES if any(name in row.figures for row in rows)]


def cell_table(comparison: Comparison, cell: Cell) -> tuple[list[str], list[list[str]]]:
    """Titles and rows of a cell: ranked rows first, then the others."""
    reference = comparison.record.header["reference"]
    figures = figures_shown(comparison, cell)
    ranked = comparison.ranking(cell)
    places = {row.variant: str(place) for place, row in enumerate(ranked, 1)}
    others = [row for row in comparison.rows if row.cell == cell and row.variant not in places]
    ratio_of = figures[-1] if figures else ""
    titles = ["rank", "variant", "tokens", "speed / reference's"]
    titles += [*(FIGURES[name] for name in figures), "peak MiB"]
    changed = any(row.changes for row in comparison.rows)
    titles += ["speed / older record's"] * changed
    rows = []
    for row in (*ranked, *others):
        values = [spread_text(row.figures[f]) if f in row.figures else "-" for f in figures]
        cells = [places.get(row.variant, "-"), row.variant, row.parity.verdict]
        cells += [shown_ratio(row, ratio_of, reference), *values]
        cells.append("-" if row.peak_mib is None else f"{row.peak_mib:.0f}")
        if changed:
            change = row.changes.get(ratio_of)
            cells.append("-" if change is None else f"{interval_text(change)}, {change.verdict}")
        rows.append(cells)
    return titles, rows


def remarks(comparison: Comparison) -> list[str]:
    """Where tokens part, how programs started, and the notes of the comparison."""
    found, seen = [], set[str]()
    for row in comparison.rows:
        if row.variant in seen:
            continue
        seen.add(row.variant)
        if row.parity.text:
            found.append(f"{row.variant}: {row.parity.verdict}: {row.parity.text}.")
        if row.facts:
            facts = row.facts
            dtype = facts.get("dtype", "dtype not told")
            programs = f", {facts['num_programs']} programs" if "num_programs" in facts else ""
            found.append(
                f"{row.variant}: {facts.get('name', 'unnamed')}, {dtype}; "
                f"ready after {facts['ready_s']:.1f} s, of which {facts.get('compile_s', 0):.1f} s "
                f"to compile{programs}."
            )
        runs = comparison.record.of("run", variant=row.variant)
        found += [f"{row.variant}: {line}" for line in (runs[-1].get("said", []) if runs else [])]
    rounds = comparison.record.header["rounds"]
    found.append(
        f"Medians and quartiles of {rounds} rounds; speeds are those of the last figure, and above "
        "1 a variant is faster than the reference. Intervals hold the ratio with 95 % (bootstrap)."
    )
    if "seed" in comparison.record.header:
        found.append(f"--seed {comparison.record.header['seed']} repeats the prompts.")
    return [*found, *comparison.notes]


def markdown_text(comparison: Comparison) -> str:
    """Tables and remarks, to be pasted."""
    header = comparison.record.header
    parts = []
    for cell in comparison.record.cells:
        titles, rows = cell_table(comparison, cell)
        lines = [_line(titles), f"|{'---|' * len(titles)}"]
        lines += map(_line, rows)
        parts.append(f"**{cell.name}**\n\n" + "\n".join(lines))
    parts.append("\n".join(f"- {_escaped(line)}" for line in remarks(comparison)))
    environment = header["environment"]
    packages = ", ".join(f"{name} {version}" for name, version in environment["packages"].items())
    parts.append(
        f"{header['when']}, {environment['processor']}, {environment['cpu_count']} CPU cores, "
        f"{environment['system']}, Python {environment['python']}, {packages}.\n\n"
        f"```sh\n{header['command']}\n```"
    )
    return "\n\n".join(parts) + "\n"


def _line(cells: Sequence[str]) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(map(_escaped, cells))} |"


def _escaped(text: str) -> str:
    """Text without what Markdown or HTML would read."""
    plain = " ".join(text.split())
    return re.sub(r"([\\`*_{}\[\]|#])", r"\\\1", plain).replace("<", "&lt;")


COLUMNS = (
    "cell",
    "variant",
    "verdict",
    "ranked",
    "why",
    "figure",
    "median",
    "low",
    "high",
    "rounds",
)
RATIOS = ("ratio", "ratio_low", "ratio_high")


def csv_text(comparison: Comparison) -> str:
    """A line for each figure of each row."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow((*COLUMNS, *RATIOS))
    for row in comparison.rows:
        why = row.other_work or row.parity.text
        of_row = (row.cell.name, row.variant, row.parity.verdict, row.is_ranked, why)
        if not row.figures:
            writer.writerow((*of_row, *[""] * (len(COLUMNS) + len(RATIOS) - len(of_row))))
        for name, value in row.figures.items():
            first = (*of_row, name)
            found = row.ratios.get(name)
            ratios = ("", "", "") if found is None else dataclasses.astuple(found)
            writer.writerow((*first, *dataclasses.astuple(value), len(row.rounds[name]), *ratios))
    return text.getvalue()


def json_text(comparison: Comparison) -> str:
    """The header, and a record of each row."""
    rows: list[dict[str, Any]] = []
    for row in comparison.rows:
        record = {**dataclasses.asdict(row), "cell": row.cell.name, "ranked": row.is_ranked}
        rows.append(record)
    return json.dumps(
        {**comparison.record.header, "rows": rows, "notes": comparison.notes}, indent=2
    )
