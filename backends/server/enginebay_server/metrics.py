"""Metrics of an application for Prometheus, by the names that vLLM's dashboards know, with the
prefix `enginebay:`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from enginebay.errors import UnsupportedError
from enginebay.ops.spec import Bucket, Mode
from enginebay.serving.observer import Ending, Execution, Observer, Update
from enginebay.types import FinishReason
from enginebay_server.adapter_metrics import AdapterMetrics, merged
from enginebay_server.api_fields import FIELDS_OF_PATH, OTHER_FIELDS
from enginebay_server.decode_rate import ROOFLINE, DecodeRate
from enginebay_server.limits import ConcurrencyLimit
from enginebay_server.served import ServedModel

with contextlib.suppress(ImportError):  # check_installed() says what is missing
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
    )
import bisect
import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client.core import HistogramMetricFamily
from enginebay.errors import EnginebayError

PREFIX = "enginebay:"
LABEL = "model_name"


class EngineObserver(Observer):
    """Counts what the engine of one model reports. The engine's thread calls the methods, so
    they do little. A reader on another thread may see a request in one metric and not yet in
    another.
    """

    def __init__(self, decodes: DecodeRate) -> None:
        self.decodes = decodes
        self.num_preempted = self.num_new_tokens = self.num_prompt = self.num_cached = 0
        self.num_not_finite = 0
        self.num_from_host = self.num_from_disk = 0
        self.num_drafts = self.num_draft_tokens = self.num_accepted = 0
        self.num_steps: Counter[Bucket] = Counter()
        self.num_launched: Counter[Mode] = Counter()
        self.num_with_padding: Counter[Mode] = Counter()
        self.iteration_tokens = Histogram(
            "iteration_tokens_total",
            "Tokens of a step.",
            (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048),
        )
        self.first_token = _seconds("time_to_first_token_seconds", "From arrival to first token.")
        self.latency = _seconds("e2e_request_latency_seconds", "From arrival to the last token.")
        self.queued = _seconds("request_queue_time_seconds", "From arrival to the first step.")
        self.prefill = _seconds("request_prefill_time_seconds", "First step to first token.")
        self.decode = _seconds("request_decode_time_seconds", "First token to last.")
        self.inference = _seconds("request_inference_time_seconds", "First step to last token.")
        self.per_token = Histogram(
            "request_time_per_output_token_seconds",
            "Mean time of a request's tokens after the first.",
            STEP_SECONDS,
        )
        self.prompt_tokens = Histogram("request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self.new_tokens = Histogram("request_generation_tokens", "New tokens.", TOKENS)

    @property
    def histograms(self) -> Sequence[Histogram]:
        """All histograms of this observer."""
        return [one for one in vars(self).values() if isinstance(one, Histogram)]

    def updated(self, update: Update) -> None:
        self.num_preempted += update.num_preempted

    def executed(self, execution: Execution) -> None:
        self.num_new_tokens += execution.num_new_tokens
        self.num_not_finite += execution.num_not_finite
        self.num_drafts += execution.num_drafts
        self.num_draft_tokens += execution.num_draft_tokens
        self.num_accepted += execution.num_accepted_tokens
        self.iteration_tokens.observe(execution.num_new_tokens)
        self.decodes.add(execution)
        bucket = execution.bucket
        if bucket is not None:
            self.num_steps[bucket] += 1
            if execution.num_bucket_tokens:
                self.num_launched[bucket.mode] += execution.num_tokens
                self.num_with_padding[bucket.mode] += execution.num_bucket_tokens

    def ended(self, ending: Ending) -> None:
        """Count a completion's tokens and times. One that never ran has none; one without
        a new token has a prompt and a queue time only.
        """
        times = ending.metrics
        if math.isnan(times.first_scheduled_s):
            return
        self.num_prompt += times.num_prompt_tokens
        self.num_cached += times.num_cached_tokens
        self.num_from_host += times.num_host_tokens
        self.num_from_disk += times.num_disk_tokens
        self.prompt_tokens.observe(times.num_prompt_tokens)
        self.queued.observe(times.first_scheduled_s - times.arrival_s)
        if math.isnan(times.first_token_s) or math.isnan(times.finished_s):
            return
        self.new_tokens.observe(times.num_generated_tokens)
        self.first_token.observe(times.first_token_s - times.arrival_s)
        self.prefill.observe(times.first_token_s - times.first_scheduled_s)
        self.decode.observe(times.finished_s - times.first_token_s)
        self.inference.observe(times.finished_s - times.first_scheduled_s)
        self.latency.observe(times.finished_s - times.arrival_s)
        if times.num_generated_tokens > 1:
            span_s = times.finished_s - times.first_token_s
            self.per_token.observe(span_s / (times.num_generated_tokens - 1))


class ModelMetrics:
    """The metrics of one model: those of its engine, and the times that its clients see."""

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        self.engine = EngineObserver(DecodeRate(model.llm.plan))
        self.inter_token = Histogram(
            "inter_token_latency_seconds", "Between tokens of a stream.", STEP_SECONDS
        )
        self.num_ended: dict[FinishReason, int] = dict.fromkeys(
            ("stop", "length", "abort", "error"), 0
        )
        self.pages = PageMap(model)
        self._capacity = max(1, model.llm.engine.ledger.num_free_tokens)
        self._num_pages = {
            group: layout.num_pages - 1  # page 0 is never used
            for _, layouts in model.llm.engine.attention_problems()
            for group, layout in layouts.items()
        }
        model.llm.loop.observers.add(self.engine)

    @property
    def cache_usage(self) -> float:
        """The part of the cache that requests hold, as the engine's thread last set it."""
        free = self.model.llm.engine.ledger.num_free_tokens
        return min(1.0, max(0.0, 1 - free / self._capacity))

    @property
    def achieved_gigabytes_per_s(self) -> float:
        """The rate at which the last minute's decode steps read, see DecodeRate."""
        return self.engine.decodes.bytes_per_s / 1e9

    @property
    def roofline_gigabytes_per_s(self) -> float:
        """The measured read rate of the memory; 0 before it was measured."""
        return (ROOFLINE.known(self.model.llm.plan) or 0.0) / 1e9

    @property
    def gauges(self) -> dict[tuple[str, str], float]:
        """Current values by (name, description)."""
        counts = self.model.llm.counts()
        return {
            ("num_requests_running", "Requests that the engine runs."): counts.running,
            ("num_requests_waiting", "Requests that wait in the engine."): counts.waiting,
            (
                "kv_cache_usage_perc",
                "Part of the cache that requests hold, 0 to 1.",
            ): self.cache_usage,
            (
                "decode_achieved_gigabytes_per_second",
                "Weights and cache that the last minute's decode steps read on each device.",
            ): self.achieved_gigabytes_per_s,
            (
                "memory_roofline_gigabytes_per_second",
                "The measured rate of reads from memory of one device; 0 before it was measured.",
            ): self.roofline_gigabytes_per_s,
            (
                "programs_coming",
                "Steps whose program is compiled beside the requests and is not there yet.",
            ): len(self.model.llm.engine.compilations.coming),
        }

    async def measure(self) -> None:
        """Measure the memory's rate once, while no request runs."""
        model, plan = self.model, self.model.llm.plan
        if model.is_ready and ROOFLINE.known(plan) is None and not model.llm.counts().running:
            await asyncio.to_thread(ROOFLINE.measure, plan)

    def pages_by_state(self) -> Mapping[str, Mapping[str, int]]:
        """Return the number of pages in each state by cache group, as of the latest read of
        `pages`; nothing for an engine whose cache has no pages.
        """
        return {
            group: _count_pages(holders[1:], self._num_pages.get(group, len(holders) - 1))
            for group, holders in (self.pages.latest or {}).items()
        }

    @property
    def kernels(self) -> Sequence[tuple[str, str, str]]:
        """The op, phase and kernel of each choice; the phase is "" for ops that have none."""
        names = self.model.llm.plan.kernels.names
        return [(*_op_and_phase(setting), kernel) for setting, kernel in names.items()]

    @property
    def counters(self) -> dict[tuple[str, str], float]:
        """Totals since the application was created, by (name, description)."""
        engine, compilations = self.engine, self.model.llm.engine.compilations
        return {
            ("num_preemptions", "Requests that lost their row for a time."): engine.num_preempted,
            ("non_finite_logits", "Requests ended by NaN or infinity."): engine.num_not_finite,
            ("prompt_tokens", "Tokens of prompts of ended completions."): engine.num_prompt,
            ("generation_tokens", "New tokens."): engine.num_new_tokens,
            ("prefix_cache_queries", "Prompt tokens looked up in the cache."): engine.num_prompt,
            ("prefix_cache_hits", "Prompt tokens found in the cache."): engine.num_cached,
            (
                "prefix_cache_host_hits",
                "Prompt tokens found in the host tier of the cache.",
            ): engine.num_from_host,
            (
                "prefix_cache_disk_hits",
                "Prompt tokens found in the disk tier of the cache.",
            ): engine.num_from_disk,
            ("spec_decode_num_drafts", "Rows of steps that verified a draft."): engine.num_drafts,
            ("spec_decode_num_draft_tokens", "Tokens drafted."): engine.num_draft_tokens,
            ("spec_decode_num_accepted_tokens", "Drafted tokens accepted."): engine.num_accepted,
            ("compilations", "Programs compiled."): compilations.count,
            (
                "compilation_seconds",
                "Seconds of compilations; those at the same time count each.",
            ): compilations.seconds,
            (
                "stand_in_steps",
                "Steps that ran in programs of other steps; their own was not compiled.",
            ): compilations.stand_ins.total(),
        }


class Metrics:
    """The figures of one application. Reading them needs prometheus_client."""

    def __init__(self, models: Sequence[ServedModel], limit: ConcurrencyLimit) -> None:
        self.of = {model.name: ModelMetrics(model) for model in models}
        self._limit = limit
        self._num_ignored = Counter({(path, "other"): 0 for path in FIELDS_OF_PATH})
        """Requests by path and ignored field."""

    def count_ignored(self, path: str, names: Iterable[str]) -> None:
        """Count the ignored fields of a request, or parts of them such as "text.verbosity". Fields
        that no API has are counted together, so that clients make no labels.
        """
        api = FIELDS_OF_PATH.get(path, OTHER_FIELDS)
        fields = {name.partition(".")[0] for name in names}
        known = {one if one in api.ignored or one in api.honoured else "other" for one in fields}
        self._num_ignored.update((path, field) for field in known)

    async def text(self) -> bytes:
        """All figures, in Prometheus' text format. UnsupportedError without prometheus_client."""
        check_installed()
        await asyncio.gather(*(one.measure() for one in self.of.values()))
        await asyncio.gather(*(one.pages.read() for one in self.of.values()))
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics; prometheus_client calls this when the registry is read."""
        each = list(self.of.values())
        for name, what in each[0].gauges:
            gauge = GaugeMetricFamily(PREFIX + name, what, labels=[LABEL])
            for one in each:
                gauge.add_metric([one.model.name], one.gauges[name, what])
            yield gauge
        for name, what in each[0].counters:
            counter = CounterMetricFamily(PREFIX + name, what, labels=[LABEL])
            for one in each:
                counter.add_metric([one.model.name], one.counters[name, what])
            yield counter
        yield from self._labelled(each)
        yield from merged([AdapterMetrics(one.model).collect(PREFIX, LABEL) for one in each])
        yield from self._steps(each)
        ended = CounterMetricFamily(
            f"{PREFIX}request_success",
            "Completions by how they ended.",
            labels=[LABEL, "finished_reason"],
        )
        for one in each:
            for reason, count in one.num_ended.items():
                ended.add_metric([one.model.name, reason], count)
        yield ended
        for place, first in enumerate(self._histograms(each[0])):
            family = HistogramMetricFamily(PREFIX + first.name, first.what, labels=[LABEL])
            for one in each:
                self._histograms(one)[place].add_to(family, [one.model.name])
            yield family
        ignored = CounterMetricFamily(
            f"{PREFIX}ignored_fields",
            "Requests with a field, or a part of it, that changed no answer.",
            labels=["path", "field"],
        )
        for labels, count in self._num_ignored.items():
            ignored.add_metric(labels, count)
        yield ignored
        yield GaugeMetricFamily(
            f"{PREFIX}http_requests_queued",
            "HTTP requests that wait for a place in the engine.",
            value=self._limit.num_waiting,
        )

    @staticmethod
    def _labelled(each: Sequence[ModelMetrics]) -> Iterator[Metric]:
        """Pages by cache group and state, and the kernels that run."""
        usage = GaugeMetricFamily(
            f"{PREFIX}kv_cache_group_usage_perc",
            "Part of a cache group's pages that requests hold, 0 to 1.",
            labels=[LABEL, "group"],
        )
        pages = GaugeMetricFamily(
            f"{PREFIX}kv_cache_group_pages",
            "Pages of a cache group by who holds them.",
            labels=[LABEL, "group", "state"],
        )
        kernels = GaugeMetricFamily(
            f"{PREFIX}kernel_info",
            "The kernel that runs each op; always 1.",
            labels=[LABEL, "op", "phase", "kernel"],
        )
        for one in each:
            name = one.model.name
            for group, states in one.pages_by_state().items():
                held = states["held"] + states["shared"]
                usage.add_metric([name, group], held / sum(states.values()))
                for state, count in states.items():
                    pages.add_metric([name, group, state], count)
            for op, phase, kernel in one.kernels:
                kernels.add_metric([name, op, phase, kernel], 1)
        yield from (usage, pages, kernels)

    @staticmethod
    def _steps(each: Sequence[ModelMetrics]) -> Iterator[Metric]:
        """Steps by the bucket of their program, and tokens with and without padding."""
        steps = CounterMetricFamily(
            f"{PREFIX}steps",
            "Steps by the sizes of the compiled program that ran.",
            labels=[LABEL, "mode", "tokens", "rows", "context"],
        )
        launched = CounterMetricFamily(
            f"{PREFIX}step_tokens",
            "Tokens that steps were launched for.",
            labels=[LABEL, "mode"],
        )
        padded = CounterMetricFamily(
            f"{PREFIX}step_bucket_tokens",
            "Tokens that the programs of these steps computed, with padding.",
            labels=[LABEL, "mode"],
        )
        for one in each:
            name = one.model.name
            sums: Counter[tuple[str, ...]] = Counter()
            for bucket, count in one.engine.num_steps.copy().items():
                sizes = bucket.tokens, bucket.seqs, bucket.max_kv_len
                sums[name, bucket.mode, *map(str, sizes)] += count
            for labels, count in sums.items():
                steps.add_metric(labels, count)
            for mode, count in one.engine.num_launched.copy().items():
                launched.add_metric([name, mode], count)
            for mode, count in one.engine.num_with_padding.copy().items():
                padded.add_metric([name, mode], count)
        yield from (steps, launched, padded)

    @staticmethod
    def _histograms(one: ModelMetrics) -> Sequence[Histogram]:
        return [*one.engine.histograms, one.inter_token]


def check_installed() -> None:
    """Raise UnsupportedError without prometheus_client."""
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        raise UnsupportedError(
            "metrics without prometheus_client",
            "an environment with it",
            "Install it: pip install 'enginebay[serve]'",
        ) from None


def _count_pages(holders: np.ndarray, num_pages: int) -> Mapping[str, int]:
    """Count the pages of a group by state. `holders` is as `Ledger.page_holders` returns it,
    without page 0; pages that were never used are left out at its end.
    """
    states = {
        "held": int((holders == 1).sum()),
        "shared": int((holders > 1).sum()),
        "kept": int((holders < 0).sum()),
    }
    return {**states, "free": num_pages - sum(states.values())}


def _op_and_phase(setting: str) -> tuple[str, str]:
    op, _, phase = setting.partition(".")
    return op, phase


def _seconds(name: str, what: str) -> Histogram:
    return Histogram(name, what, SECONDS)


SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
    10.0, 20.0, 40.0, 80.0, 160.0, 640.0,
)  # fmt: skip
"""Bounds of the times of a request, in seconds."""

STEP_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3,
    0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
"""Bounds of the times of a token, in seconds."""

TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Histogram:
    """Counts values by upper bound. Unlike prometheus_client's histogram it has no locks and
    labels, whose cost per token is too high.
    """

    def __init__(self, name: str, what: str, bounds: Sequence[float]) -> None:
        self.name = name
        self.what = what
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, `times` times."""
        self._counts[bisect.bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Write the counts into a metric family of the same name."""
        from prometheus_client.utils import floatToGoString

        totals = itertools.accumulate(list(self._counts))
        names = [floatToGoString(bound) for bound in (*self._bounds, float("inf"))]
        buckets = list(zip(names, totals, strict=True))
        family.add_metric(list(labels), buckets=buckets, sum_value=self._sum)


LIMIT_S = 0.5
"""Seconds that a read waits for the engine, which may be compiling."""


class PageMap:
    """The holders of a model's pages, read on the engine's thread. One read runs at a time, because
    the engine answers late while it compiles.

    `latest` is the result of the last read that ended (see `Ledger.page_holders`); None before the
    first.
    """

    def __init__(self, model: ServedModel) -> None:
        self.latest: Mapping[str, np.ndarray] | None = None
        self._llm = model.llm
        self._reading: asyncio.Task[None] | None = None

    async def read(self) -> Mapping[str, np.ndarray] | None:
        """Read the holders of each page by cache group and return `latest`, which is the result of
        an earlier read if the engine is busy.
        """
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read())
        await asyncio.wait({self._reading}, timeout=LIMIT_S)
        return self.latest

    async def _read(self) -> None:
        holders = self._llm.engine.ledger.page_holders
        try:
            self.latest = await asyncio.to_thread(self._llm.run_on_engine, holders)
        except EnginebayError:  # the engine has stopped
            return
