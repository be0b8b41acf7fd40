"""The results of a run as one HTML page: tables and plots, no script, nothing from another host."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from enginebay_bench.serve.figures import Summary
from enginebay_bench.serve.plots import Axis, Line, cumulative_line, legend, line_plot
from enginebay_bench.serve.run import Measurement
from enginebay_bench.serve.timeline import RequestTimeline

STYLE = """
:root{color-scheme:light dark;--ink:#1c2330;--soft:#5d6675;--rule:#d9dee6;--back:#fff;
--c0:#2563b0;--c1:#c2571a;--c2:#2c7d4f;--c3:#8b3fa0;--c4:#a8323e;--c5:#5c6a00}
@media(prefers-color-scheme:dark){:root{--ink:#e6eaf0;--soft:#9aa5b4;--rule:#343c48;--back:#14181f;
--c0:#6ea8ff;--c1:#ff9d5c;--c2:#63cf93;--c3:#d391e8;--c4:#ff7f8a;--c5:#cfdc5a}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--back);
max-width:1120px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.4rem;margin-bottom:0}h2{font-size:1.1rem;margin-top:2rem}p.note{color:var(--soft)}
div.wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
div.wide table{font-size:13px}td{white-space:nowrap}th{vertical-align:bottom}
th,td{padding:.3rem .35rem;border-bottom:1px solid var(--rule);text-align:right}
th:first-child,td:first-child{text-align:left}
pre{background:color-mix(in srgb,var(--rule) 40%,transparent);padding:.7rem;overflow-x:auto}
div.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:1rem}
svg{width:100%;height:auto}svg text{fill:var(--soft);font-size:11px}
svg text.title{fill:var(--ink);font-size:13px;font-weight:600}
svg text.y{text-anchor:end;dominant-baseline:middle}svg text.x{text-anchor:middle}
svg text.name{text-anchor:end}.grid{stroke:var(--rule);fill:none}
.limit{stroke:var(--c4);stroke-dasharray:5 4;fill:none}
.line{fill:none;stroke-width:1.8}.c0{stroke:var(--c0)}.c1{stroke:var(--c1)}.c2{stroke:var(--c2)}
.c3{stroke:var(--c3)}.c4{stroke:var(--c4)}.c5{stroke:var(--c5)}.dot{fill:var(--back)}
ul.legend{list-style:none;padding:0;display:flex;flex-wrap:wrap;gap:.2rem 1.2rem;font-size:13px}
svg.key{width:18px;height:8px;margin-right:.4rem}
"""

LATENCIES = (
    ("ttft", "Time to first token"),
    ("tpot", "Time per output token after the first"),
    ("itl", "Time between chunks"),
    ("e2e", "Time to the last token"),
)
MS = 1000.0
NUM_BINS = 120


def make_page(record: Mapping[str, Any], measured: Sequence[Measurement]) -> str:
    """The page of a run; `record` is what result.json has."""
    limits_s: Mapping[str, float] = record["settings"].get("bounds_s") or {}
    server, found = record["server"], record.get("found_rate")
    parts = [
        f"<h1>{_text(server['model'])} at {_text(server['address'])}</h1>",
        f'<p class="note">{_text(record["settings"]["requests"])}</p>',
        *(f"<p><strong>{_text(line)}</strong></p>" for line in record["warnings"]),
        f"<p><strong>{_text(found['text'])}</strong></p>" if found else "",
        "<h2>Loads</h2>",
        _table(measured),
        _errors(measured),
    ]
    if len(measured) > 1:
        parts.append(
            _section("Latency by load", _by_load(measured, limits_s), ("p50", "p90", "p99"))
        )
    names = [one.figures.load for one in measured]
    parts.append(_section("Distributions", _distributions(measured), names))
    parts.append(_section("Over time", _over_time(measured), names))
    environment = record["environment"]
    packages = ", ".join(f"{name} {version}" for name, version in environment["packages"].items())
    client = f"enginebay {environment['enginebay']}, Python {environment['python']}, "
    client += f"{environment['system']}, {environment['cpu_count']} CPU cores; {packages}"
    parts += [
        "<h2>Where and how</h2>",
        f"<p>Client: {_text(client)}.</p>",
        f"<p>Server: {_text(server['version'] or 'it does not report a version')}.</p>",
        f"<p>Measured {_text(record['when'])}. This repeats it:</p>",
        f"<pre>{_text(record['command'])}</pre>",
    ]
    body = "\n".join(part for part in parts if part)
    title = f"enginebay bench serve: {_text(server['model'])}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _text(value: object) -> str:
    return html.escape(str(value))


def _table(measured: Sequence[Measurement]) -> str:
    """The figures of all loads; times in milliseconds."""
    titles = ["load", "answered", "failed", "requests/s", "output tokens/s"]
    titles += [f"{name.upper()} {p}, ms" for name, _ in LATENCIES for p in ("p50", "p90", "p99")]
    titles += ["within bounds", "goodput/s", "in flight, mean", "client CPU us/token"]
    rows = []
    for f in (one.figures for one in measured):
        cells = [f.load, str(f.num_answered), str(f.num_failed)]
        cells += [f"{f.requests_per_s:.3g}", f"{f.output_tokens_per_s:.4g}"]
        for summary in (f.ttft_s, f.tpot_s, f.itl_s, f.e2e_s):
            cells += _milliseconds(summary)
        cells.append("-" if f.good_share is None else f"{100 * f.good_share:.1f} %")
        cells.append("-" if f.goodput_per_s is None else f"{f.goodput_per_s:.3g}")
        cpu = f.client_cpu_us_per_token
        rows.append([*cells, f"{f.mean_in_flight:.3g}", "-" if cpu is None else f"{cpu:.0f}"])
    head = "".join(f"<th>{_text(title)}</th>" for title in titles)
    lines = "".join(f"<tr>{''.join(f'<td>{_text(c)}</td>' for c in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>{lines}</table></div>'


def _milliseconds(summary: Summary | None) -> list[str]:
    if summary is None:
        return ["-"] * 3
    return [f"{MS * value:.4g}" for value in (summary.p50, summary.p90, summary.p99)]


def _errors(measured: Sequence[Measurement]) -> str:
    rows = [
        f"<tr><td>{_text(one.figures.load)}</td><td>{count}</td><td>{_text(why)}</td></tr>"
        for one in measured
        for why, count in one.figures.errors.items()
    ]
    if not rows:
        return ""
    head = "<tr><th>load</th><th>failed</th><th>why</th></tr>"
    return f'<h2>Failures</h2><div class="wide"><table>{head}{"".join(rows)}</table></div>'


def _section(title: str, plots: Iterable[str], names: Sequence[str]) -> str:
    drawn = "".join(f"<div>{plot}</div>" for plot in plots if plot)
    if not drawn:
        return ""
    return f'<h2>{title}</h2>{legend(names)}<div class="plots">{drawn}</div>'


def _by_load(measured: Sequence[Measurement], limits_s: Mapping[str, float]) -> list[str]:
    """p50, p90 and p99 of each latency over the rate, or over the requests in flight."""
    is_open = any(one.figures.rate is not None for one in measured)
    x = Axis("requests per second" if is_open else "requests in flight")

    def place(one: Measurement) -> float:
        return (one.figures.rate if is_open else one.figures.concurrency) or 0.0

    alike = [one for one in measured if (one.figures.rate is not None) == is_open]
    ordered = sorted(alike, key=place)
    plots = []
    for name, title in LATENCIES:
        summaries = [(place(one), getattr(one.figures, f"{name}_s")) for one in ordered]
        lines = [
            Line(p, [(at, MS * getattr(s, p)) for at, s in summaries if s], has_dots=True)
            for p in ("p50", "p90", "p99")
        ]
        limit = MS * limits_s[name] if name in limits_s and name != "itl" else None
        plots.append(line_plot(title, x, Axis("ms"), lines, limit))
    rates = [(place(one), one.figures.output_tokens_per_s) for one in ordered]
    plots.append(
        line_plot("Output", x, Axis("tokens per second"), [Line("tokens/s", rates, has_dots=True)])
    )
    return plots


def _distributions(measured: Sequence[Measurement]) -> list[str]:
    """The share of requests, or of gaps, that took at most a time."""

    def values(one: Measurement, name: str) -> list[float]:
        answered = [t for t in one.timelines if t.error is None]
        if name == "itl":
            return [MS * gap for t in answered for gap in t.gaps_s]
        return [MS * getattr(t, f"{name}_s") for t in answered]

    return [
        line_plot(
            title,
            Axis("ms"),
            Axis("share", 1.0),
            [cumulative_line(one.figures.load, values(one, name)) for one in measured],
        )
        for name, title in LATENCIES
    ]


def _over_time(measured: Sequence[Measurement]) -> list[str]:
    x = Axis("seconds from the first request")
    plots = (
        ("Requests in flight", "requests", _in_flight),
        ("Chunks", "chunks per second", _chunks),
        ("Time to first token, by arrival", "ms", _first_tokens),
    )
    return [line_plot(title, x, Axis(unit), _lines(measured, make)) for title, unit, make in plots]


Points = list[tuple[float, float]]


def _lines(
    measured: Sequence[Measurement], make: Callable[[Sequence[RequestTimeline], float], Points]
) -> list[Line]:
    lines = []
    for one in measured:
        first_s = min(t.due_s for t in one.timelines)
        is_stepped = make is _in_flight
        lines.append(Line(one.figures.load, make(one.timelines, first_s), is_stepped))
    return lines


def _in_flight(timelines: Sequence[RequestTimeline], first_s: float) -> Points:
    changes = [
        change
        for t in timelines
        if not math.isnan(t.sent_s)
        for change in ((t.sent_s - first_s, 1), (t.ended_s - first_s, -1))
    ]
    points, now = [(0.0, 0.0)], 0
    for at_s, change in sorted(changes):
        now += change
        points.append((max(at_s, 0.0), float(now)))
    return points


def _chunks(timelines: Sequence[RequestTimeline], first_s: float) -> Points:
    times = [at - first_s for t in timelines for at in t.chunk_s]
    if not times:
        return []
    width_s = max(max(times) / NUM_BINS, 0.1)
    counts = [0] * (int(max(times) / width_s) + 1)
    for at_s in times:
        counts[int(at_s / width_s)] += 1
    return [((place + 0.5) * width_s, count / width_s) for place, count in enumerate(counts)]


def _first_tokens(timelines: Sequence[RequestTimeline], first_s: float) -> Points:
    return sorted((t.due_s - first_s, MS * t.ttft_s) for t in timelines if t.chunk_s)
