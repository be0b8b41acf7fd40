"""The page at /ui, and the figures that it draws."""

from __future__ import annotations

import asyncio
import importlib.resources
import math
import re
import time
from collections import deque
from typing import Any

from fastapi import APIRouter
from starlette.responses import RedirectResponse, Response

from enginebay.serving.observer import Ending, Execution, Observer, Update
from enginebay_server.errors import ApiError
from enginebay_server.metrics import ModelMetrics
from enginebay_server.routes_generate import as_json
from enginebay_server.state import AppState

SCRIPTS = (
    *("page", "charts", "chat", "copying", "history", "kept", "markdown", "plots", "stream"),
    *("turns", "vendor/highlight", "vendor/marked", "vendor/purify", "vendor/uplot"),
)
STYLES = ("page", "vendor/code-dark", "vendor/code-light", "vendor/uplot")
FILES = {
    "index.html": "text/html; charset=utf-8",
    **{f"{name}.js": "text/javascript; charset=utf-8" for name in SCRIPTS},
    **{f"{name}.css": "text/css; charset=utf-8" for name in STYLES},
    "vendor/LICENSES.txt": "text/plain; charset=utf-8",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify"
)
"""The page loads nothing from other hosts, runs no inline script, and makes HTML only of what
DOMPurify has sanitised.
"""


def page_routes(state: AppState) -> APIRouter:
    """/ui, its files, and /ui/data."""
    router = APIRouter(include_in_schema=False)
    views = [ModelView(state.metrics.of[model.name]) for model in state.models]
    folder = importlib.resources.files("enginebay_server") / "ui"

    @router.get("/ui")
    async def page() -> Response:
        return RedirectResponse("/ui/")

    @router.get("/ui/data")
    async def data(since: str = "") -> Response:
        """Figures of each model. `since`: the first record number that the page lacks, by model in
        order, with commas between.
        """
        parts = since.split(",")
        numbers = [int(part) if re.fullmatch("[0-9]{1,18}", part) else 0 for part in parts]
        numbers += [0] * len(views)
        each = [view.figures(number) for view, number in zip(views, numbers, strict=False)]
        models, queued = await asyncio.gather(*each), state.limit.num_waiting
        return as_json({"ready": state.is_ready, "queued": queued, "models": models})

    @router.get("/ui/{name:path}")
    async def file(name: str) -> Response:
        name = name or "index.html"
        if name not in FILES:
            raise ApiError(404, f"the page has no file {name[:100]!r}")
        headers = {"Content-Security-Policy": POLICY, "Cache-Control": "no-cache"}
        content = await state.lanes.files.run((folder / name).read_bytes)
        return Response(content, headers=headers, media_type=FILES[name])

    return router


class ModelView:
    """What the page shows of one model."""

    def __init__(self, metrics: ModelMetrics) -> None:
        self._metrics = metrics
        self._model = metrics.model
        self._watch = ActivityLog()
        metrics.model.llm.loop.observers.add(self._watch)

    async def figures(self, since: int) -> dict[str, Any]:
        """Return counts as of now, the records from the number `since` on, and the map of pages."""
        llm, metrics = self._model.llm, self._metrics
        number, records = self._watch.since(since)
        await metrics.measure()
        pages = await metrics.pages.read()
        counts = llm.counts()
        return {
            "name": self._model.name,
            "status": self._model.status,
            "engine": llm.config.engine.name,
            "max_num_seqs": llm.config.max_num_seqs,
            "running": counts.running,
            "waiting": counts.waiting,
            "compiled": llm.engine.compilations.count,
            "compile_s": llm.engine.compilations.seconds,
            "compiling_s": llm.engine.compilations.running_s,
            "coming": [str(key) for key in llm.engine.compilations.coming],
            "num_stand_ins": llm.engine.compilations.stand_ins.total(),
            "gigabytes_per_s": metrics.achieved_gigabytes_per_s,
            "roofline_gigabytes_per_s": metrics.roofline_gigabytes_per_s,
            "next": number,
            "records": records,
            "pages": pages and {name: each.tolist() for name, each in pages.items()},
        }


NUM_STEPS = 1024
"""Number of records that are kept. A page that reads them once a second misses none."""


class ActivityLog(Observer):
    """Records steps and endings. Its methods run on the engine's thread; `since` on any thread.

    Records are numbered, so that a page reads newer ones only. Times are seconds since the
    Unix epoch.
    """

    def __init__(self) -> None:
        self._records: deque[dict[str, Any]] = deque(maxlen=NUM_STEPS)
        self._next = 0
        self._offset_s = time.time() - time.monotonic()
        self._latest: dict[str, int] = {}

    def updated(self, update: Update) -> None:
        self._latest = {"waiting": update.num_waiting, "running": update.num_running}
        if update.num_preempted:
            self._add("preempt", update.at_s, 0.0, {"rows": update.num_preempted})

    def executed(self, execution: Execution) -> None:
        prompt = execution.num_prompt_tokens
        figures = {
            "rows": execution.num_rows,
            "tokens": execution.num_new_tokens,
            "prompt_tokens": prompt,
            **self._latest,
        }
        kind = "prefill" if prompt else "decode"
        self._add(kind, execution.at_s - execution.execute_s, execution.execute_s, figures)

    def ended(self, ending: Ending) -> None:
        """Record a completion, unless it never began and so has no times."""
        times = ending.metrics
        if math.isnan(times.finished_s) or math.isnan(times.first_token_s):
            return
        figures = {
            "reason": ending.reason,
            "tokens": times.num_generated_tokens,
            "cached": times.num_cached_tokens,
            "first_s": times.first_token_s - times.arrival_s,
        }
        self._add("end", times.arrival_s, times.finished_s - times.arrival_s, figures)

    def since(self, number: int) -> tuple[int, list[dict[str, Any]]]:
        """Return (number of the next record, records from `number` on that are still kept)."""
        records = list(self._records)
        return self._next, [one for one in records if one["number"] >= number]

    def _add(self, kind: str, at_s: float, seconds: float, figures: dict[str, Any]) -> None:
        record = {"number": self._next, "kind": kind, "at": at_s + self._offset_s, "s": seconds}
        self._records.append(record | figures)
        self._next += 1
