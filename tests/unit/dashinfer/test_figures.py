"""Figures of requests, of models and of steps, and their exact values."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from types import SimpleNamespace

import pytest

from enginebay.contracts.engine import Pending, StepPlan
from enginebay.outputs import RequestMetrics, StreamChunk
from enginebay.serving.events import RequestEnded
from enginebay.serving.observer import Execution
from enginebay_dashinfer.allspark import Engine, GeneratedElements, ResultQueue
from enginebay_dashinfer.statistics import StepCounters
from tests.fake_engine import FakeEngine
from tests.unit.dashinfer.conftest import MAX_LENGTH, SUCCESS, Settings, greedy
from tests.unit.dashinfer.test_life_cycle import slow_down

ARRIVAL_S = 1_700_000_000.0


# holds D12
def test_each_figure_of_a_request_has_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that arrives, waits 1 s, has tokens after 3, 4 and 5 s, and ends after 6 s."""
    now = [ARRIVAL_S]
    monkeypatch.setattr("enginebay_dashinfer.result_queue.time.time", lambda: now[0])
    results = ResultQueue(20, None)
    results._times.arrival_s = ARRIVAL_S  # by default the time when the queue was made
    assert set(results.RequestStatInfo().values()) == {round(ARRIVAL_S * 1e3), 0, 20}
    metrics = RequestMetrics(arrival_s=50.0, first_scheduled_s=51.0, num_cached_tokens=16)
    results.reader = SimpleNamespace(progress=metrics)  # type: ignore[assignment]
    for second in (3, 4, 5):
        now[0] = ARRIVAL_S + second
        results.put(StreamChunk("r", 0, "", (second, second)))
    now[0] = ARRIVAL_S + 6
    results.put(RequestEnded("r"))
    assert results.RequestStatInfo() == {
        "arrival_time": round(ARRIVAL_S * 1e3),
        "first_token_time": round((ARRIVAL_S + 3) * 1e3),
        "last_token_time": round((ARRIVAL_S + 5) * 1e3),
        "time_to_first_token": 3000,
        "time_in_queue": 1000,
        "finished_time": 6000,
        "context_token_length": 20,
        "generated_token_length": 6,
        "context_cached_length": 16,
        "context_tps": 10,
        "generate_tps": 2,
    }


# holds D14
def test_elements_have_the_documented_fields() -> None:
    assert dataclasses.asdict(GeneratedElements()) == {
        "ids_from_generate": [],
        "log_probs_list": [],
        "token_logprobs_list": [],
        "tensors_from_model_inference": {},
        "prefix_cache_len": 0,
        "prefix_len_gpu": 0,
        "prefix_len_cpu": 0,
    }


# holds D20
def test_each_figure_of_a_model_follows_what_it_does(running: Engine) -> None:
    first = running.get_as_engine_stat("one")
    assert (first.model_name, first.span_size, first.used_span) == ("one", 16, 0)
    assert first.total_token == 16 * first.total_span == first.free_token
    assert first.total_device_memory_pool_size > first.used_device_memory_pool_size == 0
    slow_down(running)
    started = [running.start_request_ids("one", None, [5 + i] * 40, greedy())[1] for i in range(6)]
    while (stat := running.get_as_engine_stat("one")).total_prefill_token < 160:
        time.sleep(0.005)
    assert (stat.running_request, stat.pendding_request) == (4, 2)
    assert stat.used_span >= 4 * 3
    assert stat.used_span + stat.free_span == stat.total_span == first.total_span
    assert stat.free_token == 16 * stat.free_span
    share = stat.used_span / stat.total_span
    assert math.isclose(stat.token_usage_percentage, 100 * share)
    pool = stat.total_device_memory_pool_size
    assert stat.used_device_memory_pool_size == round(share * pool)
    assert stat.total_generated_token > 0
    assert stat.generate_token_persec == stat.total_generated_token / 10
    assert stat.process_token_persec == stat.total_prefill_token / 10
    assert running.stop_request("one", started) is SUCCESS
    assert running.sync_request("one", started) is SUCCESS
    running._models["one"].counters.reset()
    for _ in range(2):
        handle = running.start_request_ids("one", None, [9] * 40, greedy(max_length=42))[1]
        assert running.sync_request("one", handle) is SUCCESS
    last = running.get_as_engine_stat("one")
    assert (last.running_request, last.pendding_request, last.used_span) == (0, 0, 0)
    assert (last.prefix_cache_hit_token, last.prefix_cache_miss_token) == (32, 48)
    assert (last.prefix_cache_hit_rate, last.prefix_cache_miss_rate) == (0.4, 0.6)
    assert last.total_generated_token == 4
    table = last.ToMap()
    assert set(table) == {field.name for field in dataclasses.fields(last)}
    assert table["total_span"] == str(last.total_span)
    assert f"span_size: {last.span_size}" in last.ToString().splitlines()


# holds D20
def test_the_table_of_steps_has_count_and_times_of_each_kind() -> None:
    counters = StepCounters()
    for seconds, prompt in ((0.001, 0), (0.003, 0), (0.016, 8)):
        counters.executed(Execution(time.monotonic(), seconds, 1, 1, num_prompt_tokens=prompt))
    head, decode, prefill = (line.split() for line in counters.table().splitlines())
    assert head == ["step", "count", "min", "ms", "max", "ms", "sum", "ms", "%"]
    assert decode == ["decode", "2", "1.000", "3.000", "4.000", "20.0"]
    assert prefill == ["prefill", "1", "16.000", "16.000", "16.000", "80.0"]
    assert counters.rates() == (0.3, 0.8)
    counters.reset()
    assert len(counters.table().splitlines()) == 1


# holds D01
def test_a_new_engine_logs_its_version(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "enginebay.dashinfer"):
        engine = Engine()
    version = engine.get_version_full()
    assert any(version in record.message for record in caplog.records)
    assert "/(jax:" in version


# holds D05
def test_the_warm_up_runs_a_full_batch_and_a_request_of_the_max_length(
    engine: Engine, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, num_rows, num_tokens = FakeEngine.step, set(), set()

    def counted(self: FakeEngine, plan: StepPlan) -> Pending:
        num_rows.add(len(plan.rows))
        num_tokens.update(row.num_computed + row.num_tokens for row in plan.rows)
        return step(self, plan)

    monkeypatch.setattr(FakeEngine, "step", counted)
    assert engine.install_model(settings()) is SUCCESS
    assert not num_rows, "nothing runs before the start"
    assert engine.start_model("one") is SUCCESS, engine.last_error
    assert max(num_rows) == 4
    assert max(num_tokens) == MAX_LENGTH - 1, "the last token of a request is not computed"
    stat = engine.get_as_engine_stat("one")
    assert (stat.total_generated_token, stat.prefix_cache_miss_token) == (0, 0)
    num_rows.clear()
    assert engine.stop_model("one") is SUCCESS
    assert engine.start_model("one") is SUCCESS
    assert not num_rows, "a stopped model is warm"
