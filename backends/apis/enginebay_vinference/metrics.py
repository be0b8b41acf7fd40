"""Prometheus metrics of an inference, which vInference.enable_metrics() starts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from enginebay.errors import UnsupportedError
from enginebay_vinference.prompts import PromptOutput


class InferenceMetrics:
    """Counters and histograms of one inference's prompts, labelled with its name.

    `registry` is a prometheus_client registry; None makes a new one, so that two inferences do not
    share metrics. `shared`: metrics of another inference, whose registry and collectors are used
    as well. UnsupportedError when prometheus_client is not installed.
    """

    def __init__(
        self, name: str, registry: Any = None, shared: InferenceMetrics | None = None
    ) -> None:
        self.name = name
        self.registry: Any
        self.collectors: dict[str, Any]
        if shared is not None:
            self.registry, self.collectors = shared.registry, shared.collectors
            return
        try:
            import prometheus_client as prometheus
        except ImportError:
            raise UnsupportedError(
                "metrics without prometheus_client",
                "an installation with it",
                "Run pip install 'enginebay[metrics]'.",
            ) from None
        self.registry = prometheus.CollectorRegistry() if registry is None else registry
        kinds = {
            "prompts": (prometheus.Counter, "prompts by outcome", ["inference", "outcome"]),
            "generated_tokens": (prometheus.Counter, "tokens generated", ["inference"]),
            "prompt_seconds": (
                prometheus.Histogram,
                "time from a prompt to its last token",
                ["inference"],
            ),
            "running_prompts": (prometheus.Gauge, "prompts being generated", ["inference"]),
        }
        self.collectors = {
            figure: kind(f"vinference_{figure}", text, labels, registry=self.registry)
            for figure, (kind, text, labels) in kinds.items()
        }

    @contextlib.contextmanager
    def prompt(self) -> Iterator[list[PromptOutput]]:
        """Measure one prompt. The caller appends the output to the yielded list."""
        start = time.perf_counter()
        outputs: list[PromptOutput] = []
        outcome = "error"
        with self.collectors["running_prompts"].labels(self.name).track_inprogress():
            try:
                yield outputs
                outcome = (outputs[-1].finish_reason if outputs else None) or "abandoned"
            except GeneratorExit:
                outcome = "abandoned"
                raise
            finally:
                self.collectors["prompts"].labels(self.name, outcome).inc()
                tokens = sum(o.generated_tokens or 0 for o in outputs)
                self.collectors["generated_tokens"].labels(self.name).inc(tokens)
                self.collectors["prompt_seconds"].labels(self.name).observe(
                    time.perf_counter() - start
                )
