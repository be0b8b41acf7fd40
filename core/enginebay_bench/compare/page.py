"""A comparison as one HTML page: tables and plots, no script, nothing from another host."""

from __future__ import annotations

import html
from collections.abc import Sequence

from enginebay_bench.compare.comparison import FIGURES, ComparedRow, Comparison
from enginebay_bench.compare.records import Cell
from enginebay_bench.compare.table import (
    cell_table,
    figure_text,
    figures_shown,
    interval_text,
    remarks,
)
from enginebay_bench.serve.plots import Axis, Line, legend, line_plot, ticks
from enginebay_bench.serve.report import STYLE

WIDTH, LEFT, RIGHT, BAR, GAP = 520, 150, 20, 18, 10


class ShownComparison(Comparison):
    """A comparison that notebooks show as tables and plots."""

    def _repr_html_(self) -> str:
        return body(self)


def page(comparison: Comparison) -> str:
    """The whole page."""
    title = "enginebay compare: " + ", ".join(comparison.record.variants)
    more = "svg.bars rect{opacity:.55}svg.bars .f0{fill:var(--c0)}svg.bars .f1{fill:var(--c1)}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>{STYLE}{more}</style></head>\n"
        f"<body>\n<h1>{_text(title)}</h1>\n{body(comparison)}\n</body></html>\n"
    )


def body(comparison: Comparison) -> str:
    """What the page shows, also for notebooks."""
    header = comparison.record.header
    parts = []
    for cell in comparison.record.cells:
        parts += [f"<h2>{_text(cell.name)}</h2>", _table(comparison, cell)]
        parts.append(_plots(comparison, cell))
    parts.append("<h2>Notes</h2>")
    parts += [f'<p class="note">{_text(line)}</p>' for line in remarks(comparison)]
    environment = header["environment"]
    packages = ", ".join(f"{name} {version}" for name, version in environment["packages"].items())
    where = f"{environment['processor']}, {environment['cpu_count']} CPU cores, "
    where += f"{environment['system']}, Python {environment['python']}; {packages}."
    parts += [
        "<h2>Where and how</h2>",
        f"<p>{_text(where)}</p>",
        f"<p>Measured {_text(header['when'])}. This repeats it:</p>",
        f"<pre>{_text(header['command'])}</pre>",
    ]
    return "\n".join(parts)


def _text(value: object) -> str:
    return html.escape(str(value))


def _table(comparison: Comparison, cell: Cell) -> str:
    titles, rows = cell_table(comparison, cell)
    head = "".join(f"<th>{_text(title)}</th>" for title in titles)
    lines = "".join(f"<tr>{''.join(f'<td>{_text(c)}</td>' for c in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>{lines}</table></div>'


def _plots(comparison: Comparison, cell: Cell) -> str:
    rows = [row for row in comparison.rows if row.cell == cell and row.figures]
    plots = [_bars(FIGURES[name], name, rows) for name in figures_shown(comparison, cell)]
    figures = figures_shown(comparison, cell)
    if figures:
        lines = [
            Line(
                row.variant,
                [(float(n), value) for n, value in enumerate(row.rounds[figures[-1]], 1)],
                has_dots=True,
            )
            for row in rows
            if figures[-1] in row.rounds
        ]
        title = f"{FIGURES[figures[-1]]}, by round"
        plots.append(line_plot(title, Axis("round"), Axis(""), lines))
    drawn = "".join(f"<div>{plot}</div>" for plot in plots)
    note = "Lines reach from quartile to quartile. Orange bars are not ranked."
    names = legend([row.variant for row in rows])
    return f'<p class="note">{note}</p>{names}<div class="plots">{drawn}</div>'


def _bars(title: str, figure: str, rows: Sequence[ComparedRow]) -> str:
    """A bar for the median of each row, with a line from quartile to quartile."""
    shown = [row for row in rows if figure in row.figures]
    end = max(row.figures[figure].high for row in shown)
    marks = ticks(end)
    scale = (WIDTH - LEFT - RIGHT) / max(end, marks[-1])
    height = 30 + len(shown) * (BAR + GAP) + 20
    parts = [
        f'<svg class="bars" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{_text(title)}">',
        f'<text class="title" x="{LEFT}" y="16">{_text(title)}</text>',
    ]
    for mark in marks:
        at = f"{LEFT + mark * scale:.1f}"
        parts.append(f'<path class="grid" d="M{at} 26V{height - 20}"/>')
        parts.append(f'<text class="x" x="{at}" y="{height - 6}">{figure_text(mark)}</text>')
    for place, row in enumerate(shown):
        top, value = 30 + place * (BAR + GAP), row.figures[figure]
        middle = top + BAR / 2
        low, high = (f"{LEFT + one * scale:.1f}" for one in (value.low, value.high))
        ratio = (
            f", {interval_text(row.ratios[figure])} times the reference"
            if figure in row.ratios
            else ""
        )
        name = row.variant if len(row.variant) <= 24 else f"{row.variant[:23]}…"
        parts.append(f'<text class="y" x="{LEFT - 6}" y="{middle:.1f}">{_text(name)}</text>')
        parts.append(
            f'<rect class="f{int(not row.is_ranked)}" x="{LEFT}" y="{top}" '
            f'width="{value.median * scale:.1f}" height="{BAR}"><title>'
            f"{_text(f'{row.variant}: {figure_text(value.median)}{ratio}')}</title></rect>"
        )
        parts.append(f'<path class="line c4" d="M{low} {middle:.1f}H{high}"/>')
    return "".join([*parts, "</svg>"])
