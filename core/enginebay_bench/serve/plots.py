"""Line plots as SVG text, for pages without scripts."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Callable, Sequence

WIDTH, HEIGHT = 520, 260
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 30, 40
NUM_COLORS = 6
"""Colors c0 to c5 of the page's style sheet."""

MAX_POINTS = 240


@dataclasses.dataclass(frozen=True)
class Line:
    """A named line of (x, y) points; x never falls."""

    name: str
    points: Sequence[tuple[float, float]]
    is_stepped: bool = False
    has_dots: bool = False


@dataclasses.dataclass(frozen=True)
class Axis:
    """Title of an axis, and the value that it ends at if the data do not say it."""

    title: str
    end: float | None = None


def line_plot(
    title: str, x: Axis, y: Axis, lines: Sequence[Line], limit: float | None = None
) -> str:
    """The plot as an <svg> element; "" when no line has a point. Axes begin at 0; `limit` is a
    horizontal line.
    """
    points = [point for line in lines for point in line.points]
    if not points:
        return ""
    x_end = x.end or max(p[0] for p in points) or 1.0
    y_end = y.end or max([p[1] for p in points] + ([limit] if limit is not None else [])) or 1.0
    x_ticks, y_ticks = ticks(x_end), ticks(y_end)
    x_end, y_end = max(x_end, x_ticks[-1]), max(y_end, y_ticks[-1])

    def at_x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * value / x_end

    def at_y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / y_end

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">',
        f'<text class="title" x="{LEFT}" y="16">{html.escape(title)}</text>',
    ]
    for value in y_ticks:
        height = f"{at_y(value):.1f}"
        parts.append(f'<path class="grid" d="M{LEFT} {height}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="y" x="{LEFT - 6}" y="{height}">{axis_label(value)}</text>')
    for value in x_ticks:
        where = f'x="{at_x(value):.1f}" y="{HEIGHT - BOTTOM + 16}"'
        parts.append(f'<text class="x" {where}>{axis_label(value)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="x" x="{middle:.0f}" y="{HEIGHT - 6}">{html.escape(x.title)}</text>')
    parts.append(f'<text class="name" x="{WIDTH - RIGHT}" y="16">{html.escape(y.title)}</text>')
    if limit is not None and limit <= y_end:
        parts.append(f'<path class="limit" d="M{LEFT} {at_y(limit):.1f}H{WIDTH - RIGHT}"/>')
    for place, line in enumerate(lines):
        parts += _drawn(line, place % NUM_COLORS, at_x, at_y)
    return "".join([*parts, "</svg>"])


def _drawn(
    line: Line, color: int, at_x: Callable[[float], float], at_y: Callable[[float], float]
) -> list[str]:
    places = [(f"{at_x(x):.1f}", f"{at_y(y):.1f}") for x, y in thinned(line.points)]
    if not places:
        return []
    path = f"M{places[0][0]} {places[0][1]}"
    for x, y in places[1:]:
        path += f"H{x}V{y}" if line.is_stepped else f"L{x} {y}"
    name = html.escape(line.name)
    parts = [f'<path class="line c{color}" d="{path}"><title>{name}</title></path>']
    if line.has_dots:
        parts += [f'<circle class="dot c{color}" cx="{x}" cy="{y}" r="3"/>' for x, y in places]
    return parts


def legend(names: Sequence[str]) -> str:
    """The names of lines beside their colors, as HTML."""
    items = "".join(
        f'<li><svg class="key" viewBox="0 0 18 8"><path class="line c{n % NUM_COLORS}" '
        f'd="M0 4H18"/></svg>{html.escape(name)}</li>'
        for n, name in enumerate(names)
    )
    return f'<ul class="legend">{items}</ul>'


def cumulative_line(name: str, values: Sequence[float]) -> Line:
    """The share of values (0 to 1) that are at most x, as a stepped line."""
    ordered = sorted(value for value in values if not math.isnan(value))
    points = [(value, (place + 1) / len(ordered)) for place, value in enumerate(ordered)]
    return Line(name, points, is_stepped=True)


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most MAX_POINTS of the points, evenly chosen, the last one among them."""
    if len(points) <= MAX_POINTS:
        return list(points)
    step = (len(points) - 1) / (MAX_POINTS - 1)
    return [points[round(place * step)] for place in range(MAX_POINTS)]


def ticks(end: float) -> list[float]:
    """Round values from 0 to `end` or a little more, four to eight of them."""
    raw = end / 5
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw * 0.999)
    return [step * place for place in range(math.ceil(end / step - 1e-9) + 1)]


def axis_label(value: float) -> str:
    """A value as axes show it."""
    return f"{value:.6g}"
