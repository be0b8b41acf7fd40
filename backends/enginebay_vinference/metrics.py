"""Prometheus figures of an inference, for whoever switches them on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from enginebay.errors import UnsupportedError, explain
from enginebay_vinference.prompts import PromptOutput


class InferenceMetrics:
    """Counters and histograms of the prompts of one inference, labelled with its name.

    `registry` is a prometheus_client registry; without one, a registry of its own, so that two inferences never share
    figures. UnsupportedError when prometheus_client is not installed.
    """

    def __init__(self, name: str, registry: Any = None) -> None:
        try:
            import prometheus_client as prometheus
        except ImportError:
            raise UnsupportedError(
                explain(
                    "metrics without prometheus_client",
                    "an installation with it",
                    "pip install prometheus-client",
                )
            ) from None
        self.registry = registry or prometheus.CollectorRegistry()
        self.name = name
        prefix, label = "vinference", ["inference"]
        self.prompts = prometheus.Counter(
            f"{prefix}_prompts", "prompts by outcome", [*label, "outcome"], registry=self.registry
        )
        self.tokens = prometheus.Counter(
            f"{prefix}_generated_tokens", "tokens generated", label, registry=self.registry
        )
        self.seconds = prometheus.Histogram(
            f"{prefix}_prompt_seconds", "time from a prompt to its last token", label, registry=self.registry
        )
        self.running = prometheus.Gauge(
            f"{prefix}_running_prompts", "prompts being generated", label, registry=self.registry
        )

    @contextlib.contextmanager
    def prompt(self) -> Iterator[list[PromptOutput]]:
        """Counts what happens within; the caller appends the output when there is one."""
        start = time.perf_counter()
        outputs: list[PromptOutput] = []
        with self.running.labels(self.name).track_inprogress():
            try:
                yield outputs
            finally:
                outcome = (outputs[-1].finish_reason or "error") if outputs else "error"
                self.prompts.labels(self.name, outcome).inc()
                self.tokens.labels(self.name).inc(sum(o.generated_tokens or 0 for o in outputs))
                self.seconds.labels(self.name).observe(time.perf_counter() - start)
