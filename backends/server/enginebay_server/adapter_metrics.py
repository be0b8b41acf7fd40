"""Metrics of adapters: which of them requests use, and what happens in their slots."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

from enginebay.contracts.adapters import Adapters
from enginebay_server.served import ServedModel

with contextlib.suppress(ImportError):  # metrics.check_installed() says what is missing
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric


class AdapterMetrics:
    """The metrics of the adapters of one model; none for a model without slots."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    def collect(self, prefix: str, label: str) -> Iterator[Metric]:
        """Yield the metrics; their names begin with `prefix`, and `label` has the model's name."""
        adapters = self._model.llm.plan.adapters
        if adapters is None:
            return
        name, keys, counts = self._model.name, adapters.loaded(), adapters.counts()
        waiting, running = (
            {adapter: by_key[key] for adapter, key in keys.items()}
            for by_key in self._model.llm.loop.adapter_counts
        )
        info = GaugeMetricFamily(
            f"{prefix}lora_requests_info",
            "The adapters that running and waiting requests use; the value is the time.",
            labels=[label, "max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        used = (",".join(sorted(one for one in by if by[one])) for by in (running, waiting))
        info.add_metric([name, str(counts.slots), *used], time.time())
        yield info
        for state, by_name in (("running", running), ("waiting", waiting)):
            gauge = GaugeMetricFamily(
                f"{prefix}lora_requests_{state}",
                f"Completions of an adapter that are {state}.",
                labels=[label, "lora_name"],
            )
            for adapter, count in by_name.items():
                gauge.add_metric([name, adapter], count)
            yield gauge
        yield from self._totals(adapters, prefix, label)

    def _totals(self, adapters: Adapters, prefix: str, label: str) -> Iterator[Metric]:
        name, counts = self._model.name, adapters.counts()
        loaded = GaugeMetricFamily(
            f"{prefix}lora_adapters_loaded", "Adapters that requests may name.", labels=[label]
        )
        loaded.add_metric([name], len(adapters.loaded()))
        yield loaded
        for total, what, value in (
            ("lora_slot_writes", "Adapters that were written to a slot.", counts.written),
            ("lora_slot_evictions", "Those written in place of another one.", counts.evicted),
        ):
            counter = CounterMetricFamily(f"{prefix}{total}", what, labels=[label])
            counter.add_metric([name], value)
            yield counter


def merged(each: Sequence[Iterator[Metric]]) -> Iterator[Metric]:
    """Yield the metrics of several models, those of the same name as one."""
    found: dict[str, Metric] = {}
    for metrics in each:
        for metric in metrics:
            if metric.name in found:
                found[metric.name].samples += metric.samples
            else:
                found[metric.name] = metric
    yield from found.values()
