"""The metrics of an eSurge that is scraped are the sums of what its observers are told."""

from __future__ import annotations

import pytest

from enginebay.serving.observer import Execution, Update
from enginebay_esurge import eSurge
from tests.unit.esurge.small import LONG, Watcher
from tests.unit.esurge.test_esurge_speculation import scrape  # skips without prometheus_client

pytestmark = pytest.mark.xdist_group("esurge")


class Events(Watcher):
    """Keeps every update and step."""

    def __init__(self) -> None:
        self.updates: list[Update] = []
        self.steps: list[Execution] = []

    def updated(self, update: Update) -> None:
        self.updates.append(update)

    def executed(self, execution: Execution) -> None:
        self.steps.append(execution)


def test_metrics_are_those_of_the_updates_and_steps(engine: eSurge) -> None:  # holds S14
    events = Events()
    engine.audience.add(events)
    url = engine.start_monitoring(prometheus_port=0, start_grafana=False)["prometheus"]
    engine.generate([[i] * 30 for i in range(10, 14)], LONG)
    engine.run_on_engine(lambda: None)
    seen = scrape(url)
    engine.audience.remove(events)
    engine.stop_monitoring()
    updates, steps = events.updates, events.steps
    assert {update.num_rows for update in updates} > {1}
    for name, values in {
        "batch_size": [update.num_rows for update in updates],
        "schedule_duration_seconds": [update.schedule_s for update in updates],
        "model_execution_duration_seconds": [step.execute_s for step in steps],
    }.items():
        assert seen[f"esurge_{name}_count"] == len(values)
        assert seen[f"esurge_{name}_sum"] == pytest.approx(sum(values))
    assert seen["esurge_scheduled_tokens"] == updates[-1].num_tokens
    preempted = sum(update.num_preempted for update in updates)
    assert seen["esurge_preempted_requests_total"] == preempted > 0
    assert (
        seen["esurge_cache_pages_total"]
        == engine.engine.ledger.groups["full"].store.pool.num_usable
    )


def test_the_server_counts_the_same_requests_from_the_same_reports(engine: eSurge) -> None:
    """The exporter of eSurge and the observer of `enginebay serve` are observers of one loop."""
    pytest.importorskip("orjson", reason="the extra serve is not installed")
    from enginebay_server.decode_rate import DecodeRate
    from enginebay_server.metrics import EngineObserver

    observer = EngineObserver(DecodeRate(engine.plan))
    engine.audience.add(observer)
    url = engine.start_monitoring(prometheus_port=0, start_grafana=False)["prometheus"]
    engine.generate([[i] * 30 for i in range(10, 14)], LONG)
    engine.run_on_engine(lambda: None)
    seen = scrape(url)
    engine.audience.remove(observer)
    engine.stop_monitoring()
    assert seen["esurge_tokens_generated_total"] == observer.num_new_tokens > 0
    assert seen["esurge_preempted_requests_total"] == observer.num_preempted > 0
    rate = observer.num_cached / observer.num_prompt
    assert seen["esurge_cache_hit_rate"] == pytest.approx(rate)
    assert seen["esurge_request_duration_seconds_count"] == sum(observer.latency._counts) == 4
