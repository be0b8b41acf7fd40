"""Prometheus metrics of one engine in a registry of its own, and their HTTP server."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from enginebay.errors import InputError
from enginebay.serving.observer import Ending, Execution, Observer, Update
from enginebay.waits import has_ended
from enginebay_esurge import metric_names as names
from enginebay_esurge.observing import History
from enginebay_esurge.outputs import RequestOutput

REQUEST_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
STEP_BUCKETS_S = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
RATE_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
ROWS_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Exporter(Observer):
    """Counts for Prometheus what a History records, and more. Gauges are read at each scrape."""

    def __init__(self, history: History, about: Mapping[str, str]) -> None:
        self.registry = registry = CollectorRegistry()
        service = history.service
        registry.register(_Requests(history))
        registry.register(_Shadow(history))
        self._duration = _seconds(
            names.REQUEST_DURATION, "From submission to the last token.", registry
        )
        self._first_token = _seconds(
            names.FIRST_TOKEN, "From submission to the first token.", registry
        )
        self._rate = Histogram(
            names.TOKENS_PER_SECOND,
            "Tokens per second of a request.",
            registry=registry,
            buckets=RATE_BUCKETS,
        )
        self._tokens = Counter(names.TOKENS_GENERATED, "Tokens generated.", registry=registry)
        self._preempted = Counter(names.PREEMPTED, "Preempted requests.", registry=registry)
        self._scheduled = Gauge(
            names.SCHEDULED_TOKENS, "Tokens that the last update scheduled.", registry=registry
        )
        self._rows = Histogram(
            names.BATCH_SIZE,
            "Rows that an update launched.",
            registry=registry,
            buckets=ROWS_BUCKETS,
        )
        self._schedule = _seconds(
            names.SCHEDULE_DURATION, "Time of a scheduler's decision.", registry, STEP_BUCKETS_S
        )
        self._execute = _seconds(
            names.EXECUTION_DURATION, "Time of a step, without overlap.", registry, STEP_BUCKETS_S
        )
        drafts = (
            (names.DRAFTS, "Rows of steps that verified a draft."),
            (names.DRAFT_TOKENS, "Tokens drafted and verified."),
            (names.ACCEPTED_TOKENS, "Drafted tokens that were accepted."),
        )
        self._drafts = [
            Counter(name, what, registry=registry) for name, what in drafts if history.speculates
        ]
        for name, what, read in (
            (names.WAITING, "Completions that wait.", lambda: service.num_waiting),
            (names.RUNNING, "Completions that run.", lambda: service.num_running),
            (names.PAGES, "Pages of the cache.", lambda: history.num_pages),
            (names.PAGES_USED, "Pages that requests hold.", lambda: history.num_pages_used),
            (
                names.HIT_RATE,
                "Share of prompt tokens found in the cache.",
                lambda: history.cache_hit_rate,
            ),
        ):
            Gauge(name, what, registry=registry).set_function(read)
        Info(names.SYSTEM.removesuffix("_info"), "About the server.", registry=registry).info(
            dict(about)
        )

    def updated(self, update: Update) -> None:
        self._scheduled.set(update.num_tokens)
        self._rows.observe(update.num_rows)
        self._schedule.observe(update.schedule_s)
        self._preempted.inc(update.num_preempted)

    def executed(self, execution: Execution) -> None:
        self._execute.observe(execution.execute_s)
        self._tokens.inc(execution.num_new_tokens)
        counts = (execution.num_drafts, execution.num_draft_tokens, execution.num_accepted_tokens)
        for counter, count in zip(self._drafts, counts, strict=False):
            counter.inc(count)

    def ended(self, ending: Ending) -> None:
        """Does nothing: `completed` and the totals count requests when all their completions have
        ended.
        """

    def completed(self, output: RequestOutput) -> None:
        """Record a request that ended with "stop" or "length"."""
        self._duration.observe(output.processing_time)
        if output.first_token_time is not None:
            self._first_token.observe(output.first_token_time)
        if output.tokens_per_second > 0:
            self._rate.observe(output.tokens_per_second)


class _Requests:
    """Requests by how they ended, read from the totals: garbage collection may end a request as
    well, and must not wait for a lock here.
    """

    def __init__(self, history: History) -> None:
        self._history = history

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(names.REQUESTS, "Requests that have ended.", labels=["status"])
        for status in ("completed", "failed"):
            family.add_metric([status], self._history.count(f"total_{status}"))
        yield family


class _Shadow:
    """The findings of shadow mode; nothing without a shadow."""

    def __init__(self, history: History) -> None:
        self._history = history

    def collect(self) -> Iterator[Metric]:
        report = self._history.service.parts.engine.shadow_report
        if report is None:
            return
        steps, off, bad = (
            GaugeMetricFamily(name, what, labels=["phase"])
            for name, what in (
                (names.SHADOW_STEPS, "Steps compared with a shadow."),
                (
                    names.SHADOW_DIFFERENCE,
                    "Largest absolute difference of a shadow from the chosen kernel.",
                ),
                (names.SHADOW_NONFINITE, "Values of a shadow that were not finite."),
            )
        )
        took = GaugeMetricFamily(
            names.SHADOW_DURATION, "Median time of a step's attention.", labels=["phase", "kernel"]
        )
        for phase in report.phases:
            if not phase.num_compared:
                continue
            layers = [layer for layer in report.layers if layer.phase == phase.phase]
            steps.add_metric([phase.phase], phase.num_compared)
            off.add_metric([phase.phase], max(layer.absolute for layer in layers))
            bad.add_metric([phase.phase], sum(layer.num_nonfinite for layer in layers))
            took.add_metric([phase.phase, phase.chosen], phase.chosen_s)
            took.add_metric([phase.phase, report.name], phase.candidate_s)
        failed = GaugeMetricFamily(names.SHADOW_FAILED, "Programs on which a shadow failed.")
        failed.add_metric([], report.num_failed)
        yield from (steps, off, bad, took, failed)


def _seconds(
    name: str,
    what: str,
    registry: CollectorRegistry,
    buckets: tuple[float, ...] = REQUEST_BUCKETS_S,
) -> Histogram:
    return Histogram(name, what, registry=registry, buckets=buckets)


class MetricsServer:
    """Serves a registry at http://address:port/metrics. Port 0 chooses a free port."""

    def __init__(self, registry: CollectorRegistry, address: str, port: int) -> None:
        try:
            self._server, self._thread = start_http_server(port, address, registry)
        except OSError as error:
            raise InputError(
                f"prometheus_port = {port}, which cannot be opened at {address} ({error.strerror})",
                "a free port, or 0 to choose one",
                "Pass another prometheus_port: each monitored engine needs its own.",
            ) from error
        self.url = f"http://{address}:{self._server.server_port}/metrics"

    def close(self) -> None:
        """Stop the server, and free the port."""
        if threading.current_thread() is self._thread:  # called by a finalizer on this thread
            threading.Thread(target=self.close, name="esurge-metrics-close", daemon=True).start()
            return
        # shutdown() waits for the thread, however long it takes.
        name = "esurge-metrics-shutdown"
        threading.Thread(target=self._server.shutdown, name=name, daemon=True).start()
        has_ended(self._thread)
        self._server.server_close()
