"""Figures of an installed model: its cache, its requests, and the time of its steps."""

from __future__ import annotations

import collections
import dataclasses
import threading
import time

import numpy as np

from enginebay.compose.plan import Plan
from enginebay.contracts.engine import Engine
from enginebay.serving.observer import Ending, Execution, Observer, Update

WINDOW_S = 10.0
"""Tokens per second are averages over this number of seconds."""


@dataclasses.dataclass(frozen=True, slots=True)
class AsEngineStat:
    """Figures of a model. A span is a page of the cache, of span_size tokens. The memory pool is
    the cache, in bytes on each device. Rates are tokens per second of the last 10 seconds.
    prefix_cache_cpu_hit_token counts those of prefix_cache_hit_token that came from the host tier.
    """

    model_name: str = ""
    total_span: int = 0
    used_span: int = 0
    free_span: int = 0
    total_token: int = 0
    free_token: int = 0
    span_size: int = 0
    pendding_request: int = 0
    running_request: int = 0
    total_device_memory_pool_size: int = 0
    used_device_memory_pool_size: int = 0
    total_generated_token: int = 0
    total_prefill_token: int = 0
    generate_token_persec: float = 0.0
    process_token_persec: float = 0.0
    token_usage_percentage: float = 0.0
    prefix_cache_hit_token: int = 0
    prefix_cache_miss_token: int = 0
    prefix_cache_cpu_hit_token: int = 0
    prefix_cache_hit_rate: float = 0.0
    prefix_cache_miss_rate: float = 0.0

    def ToMap(self) -> dict[str, str]:
        """Return all figures as text, by name."""
        return {name: str(value) for name, value in dataclasses.asdict(self).items()}

    def ToString(self) -> str:
        """Return all figures, one in a line."""
        return "\n".join(f"{name}: {value}" for name, value in self.ToMap().items())


@dataclasses.dataclass(slots=True)
class StepTimes:
    """Number of steps of one kind, and their seconds."""

    count: int = 0
    sum_s: float = 0.0
    min_s: float = float("inf")
    max_s: float = 0.0

    def add(self, seconds: float) -> None:
        """Count a step."""
        self.count += 1
        self.sum_s += seconds
        self.min_s, self.max_s = min(self.min_s, seconds), max(self.max_s, seconds)


class StepCounters(Observer):
    """Counts what a model has computed since its last start. The loop's thread adds; any thread may
    read.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Begin at 0."""
        with self._lock:
            self.num_generated = self.num_prefilled = 0
            self.num_hit = self.num_missed = self.num_from_host = 0
            self.steps: dict[str, StepTimes] = {}
            self._recent: collections.deque[tuple[float, int, int]] = collections.deque()

    def updated(self, update: Update) -> None:
        """Do nothing: steps are counted when they were read."""

    def executed(self, execution: Execution) -> None:
        """Count a step."""
        kind = "prefill" if execution.num_prompt_tokens else "decode"
        new, prompt = execution.num_new_tokens, execution.num_prompt_tokens
        with self._lock:
            self.steps.setdefault(kind, StepTimes()).add(execution.execute_s)
            self.num_generated += new
            self.num_prefilled += prompt
            self._recent.append((execution.at_s, new, prompt))
            self._forget_old()

    def ended(self, ending: Ending) -> None:
        """Count the prompt tokens that were in the cache or in the host tier."""
        with self._lock:
            self.num_hit += ending.metrics.num_cached_tokens
            self.num_from_host += ending.metrics.num_host_tokens
            self.num_missed += ending.metrics.num_prompt_tokens - ending.metrics.num_cached_tokens

    def rates(self) -> tuple[float, float]:
        """Return (generated tokens, computed prompt tokens) per second."""
        with self._lock:
            self._forget_old()
            new = sum(one[1] for one in self._recent)
            prompt = sum(one[2] for one in self._recent)
        return new / WINDOW_S, prompt / WINDOW_S

    def _forget_old(self) -> None:
        first_s = time.monotonic() - WINDOW_S
        while self._recent and self._recent[0][0] < first_s:
            self._recent.popleft()

    def table(self) -> str:
        """Return a table of the kinds of steps: count, seconds and share."""
        with self._lock:
            steps = dict(self.steps)
        total_s = sum(one.sum_s for one in steps.values()) or 1.0
        lines = [f"{'step':<10}{'count':>10}{'min ms':>12}{'max ms':>12}{'sum ms':>14}{'%':>8}"]
        lines += [
            f"{kind:<10}{one.count:>10}{one.min_s * 1e3:>12.3f}{one.max_s * 1e3:>12.3f}"
            f"{one.sum_s * 1e3:>14.3f}{100 * one.sum_s / total_s:>8.1f}"
            for kind, one in sorted(steps.items())
        ]
        return "\n".join(lines)


def engine_stat(
    name: str, plan: Plan, engine: Engine, counts: tuple[int, int], counters: StepCounters
) -> AsEngineStat:
    """Return the figures of a loaded model. Called between steps. `counts`: numbers of (waiting,
    running) requests.
    """
    page_size = int(plan.config.engine.options["page_size"])
    holders = engine.ledger.page_holders()
    used = sum(int(np.count_nonzero(pages > 0)) for pages in holders.values())
    free_tokens = engine.ledger.num_free_tokens
    total_span = used + free_tokens // page_size
    total_tokens, cache_bytes = total_span * page_size, engine.memory.cache_bytes
    share = used / total_span if total_span else 0.0
    seen = counters.num_hit + counters.num_missed
    generated, processed = counters.rates()
    return AsEngineStat(
        model_name=name,
        total_span=total_span,
        used_span=used,
        free_span=total_span - used,
        total_token=total_tokens,
        free_token=free_tokens,
        span_size=page_size,
        pendding_request=counts[0],
        running_request=counts[1],
        total_device_memory_pool_size=cache_bytes,
        used_device_memory_pool_size=round(share * cache_bytes),
        total_generated_token=counters.num_generated,
        total_prefill_token=counters.num_prefilled,
        generate_token_persec=generated,
        process_token_persec=processed,
        token_usage_percentage=100 * share,
        prefix_cache_hit_token=counters.num_hit,
        prefix_cache_miss_token=counters.num_missed,
        prefix_cache_cpu_hit_token=counters.num_from_host,
        prefix_cache_hit_rate=counters.num_hit / seen if seen else 0.0,
        prefix_cache_miss_rate=counters.num_missed / seen if seen else 0.0,
    )
