"""Prometheus figures of an inference, for whoever switches them on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from enginebay.errors import UnsupportedError
from enginebay_vinference.prompts import PromptOutput


class InferenceMetrics:
    """Counters and histograms of the prompts of one inference, labelled with its name.

    Without a prometheus_client registry it makes one of its own, so that two inferences never share
    figures unless they are told to: then `shared` are the metrics of another one, whose collectors
    are used. UnsupportedError when prometheus_client is not installed.
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
                "pip install 'enginebay[metrics]'",
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
        """Counts what happens within; the caller appends the output when there is one."""
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
