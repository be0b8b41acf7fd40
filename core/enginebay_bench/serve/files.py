"""The results of a run as one JSON record, and as tables of loads and of requests (CSV)."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from enginebay.errors import InputError
from enginebay_bench.serve.figures import ServeFigures
from enginebay_bench.serve.run import Measurement

REQUEST_COLUMNS = (
    *("load", "index", "due_s", "lag_s", "ttft_s", "tpot_s", "e2e_s", "longest_gap_s"),
    *("prompt_tokens", "output_tokens", "chunks", "finish_reason", "error"),
)


def load_table(measured: Sequence[Measurement]) -> str:
    """A row for each load, with a column for each figure; a summary has a column for each of its
    values, such as `ttft_s.p50`.
    """
    rows = [_flat(one.figures) for one in measured]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return _csv(columns, [[row.get(name) for name in columns] for row in rows])


def request_table(measured: Sequence[Measurement]) -> str:
    """A row for each request. `due_s` counts from the first request of its load."""
    rows = []
    for one in measured:
        first_s = min(timeline.due_s for timeline in one.timelines)
        for t in one.timelines:
            times = (t.due_s - first_s, t.lag_s, t.ttft_s, t.tpot_s, t.e2e_s)
            longest = max(t.gaps_s, default=math.nan)
            seconds = [_seconds(value) for value in (*times, longest)]
            counts = [t.num_prompt_tokens, t.num_tokens, len(t.chunk_s)]
            rows.append([one.figures.load, t.index, *seconds, *counts, t.finish_reason, t.error])
    return _csv(REQUEST_COLUMNS, rows)


def write_results(
    folder: str, record: Mapping[str, Any], measured: Sequence[Measurement], page: str
) -> None:
    """Write result.json, loads.csv, requests.csv and report.html; InputError when the folder cannot
    be written.
    """
    texts = {
        "result.json": json.dumps(record, indent=2) + "\n",
        "loads.csv": load_table(measured),
        "requests.csv": request_table(measured),
        "report.html": page,
    }
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            Path(folder, name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"--out {folder}: {error.strerror}",
            "a folder that can be written",
            "Pass another --out.",
        ) from None


def _flat(figures: ServeFigures) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, value in dataclasses.asdict(figures).items():
        if isinstance(value, dict):
            row |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            row[name] = value
    return row


def _seconds(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.6f}"


def _csv(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return out.getvalue()
