"""eSurge as a service on a fake engine: started, paused and stopped, with its figures."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from enginebay.contracts.engine import StepPlan
from enginebay.errors import InternalError, StoppedError
from enginebay.serving.observer import Update
from enginebay_esurge import BusyError, NotRunningError, RequestOutput, eSurge
from enginebay_esurge.totals import Totals
from tests.unit.esurge.small import (
    GREEDY,
    GREEDY_ON,
    LONG,
    PROMPT,
    PROMPTS,
    Watcher,
    foretold,
    thread_of,
    token_ids,
    until,
    with_,
)

pytestmark = pytest.mark.xdist_group("esurge")


def test_an_engine_that_was_not_initiated_serves_nobody(
    make_faked: Callable[..., eSurge],
) -> None:  # holds S09
    fresh = make_faked()
    fresh.terminate()
    for call in (fresh.generate, fresh.stream, fresh.chat):
        with pytest.raises(RuntimeError, match="initiate") as caught:
            call(PROMPT if call != fresh.chat else [{"role": "user", "content": "x"}])
        assert isinstance(caught.value, NotRunningError)
    fresh.pause()
    fresh.abort_request("unknown")
    assert fresh.num_pending_requests == fresh.num_running_requests == 0
    fresh.initiate()
    assert fresh.get_metrics_summary()["active_requests"] == 0, (
        "nothing was kept of the refused ones"
    )


def test_initiating_twice_is_once_and_idling_costs_nothing(engine: eSurge) -> None:  # holds S09
    thread = thread_of(engine)
    engine.initiate()
    assert thread_of(engine) is thread
    assert thread.daemon
    engine.generate(PROMPT, GREEDY)
    clock = time.pthread_getcpuclockid(thread.ident or 0)
    time.sleep(0.05)
    before = time.clock_gettime(clock)
    time.sleep(0.4)
    assert time.clock_gettime(clock) - before < 0.004, "one per cent"


def test_terminating_fails_what_is_under_way_and_initiating_serves_again(
    slow_engine: eSurge,
) -> None:  # holds S09
    wanted = token_ids(slow_engine.generate(PROMPTS, GREEDY))
    thread = thread_of(slow_engine)
    updates = slow_engine.stream(PROMPT, LONG)
    next(updates)
    slow_engine.terminate()
    slow_engine.terminate()
    assert not thread.is_alive()
    with pytest.raises(StoppedError):
        list(updates)
    slow_engine.initiate()
    assert token_ids(slow_engine.generate(PROMPTS, GREEDY)) == wanted


def test_pausing_keeps_what_is_under_way(slow_engine: eSurge) -> None:  # holds S09
    streams = [slow_engine.stream(PROMPT, LONG, f"p{i}") for i in range(6)]
    until(lambda: slow_engine.num_running_requests)
    slow_engine.pause()
    held = (slow_engine.num_running_requests, slow_engine.num_pending_requests)
    assert sum(held) == 6
    time.sleep(0.1)
    assert (slow_engine.num_running_requests, slow_engine.num_pending_requests) == held
    with pytest.raises(NotRunningError, match="resume"):
        slow_engine.generate(PROMPT)
    for request_id in ("p5", "p0"):
        slow_engine.abort_request(request_id)
    until(lambda: slow_engine.num_running_requests + slow_engine.num_pending_requests == 4)
    slow_engine.resume()
    lasts = [list(stream)[-1] for stream in streams]
    reasons = [last.outputs[0].finish_reason for last in lasts]
    assert reasons == ["abort", "length", "length", "length", "length", "abort"]
    assert {last.num_generated_tokens for last in lasts[1:5]} == {140}
    assert token_ids(lasts[1:5]) == [foretold(last) for last in lasts[1:5]], "their cache stayed"


@pytest.mark.parametrize("destroys", [True, False])
def test_an_idle_pause_frees_the_cache_if_it_may(
    make_faked: Callable[..., eSurge], destroys: bool
) -> None:  # holds S09
    ids = list(range(500, 560))
    with make_faked(destroy_pages_on_pause=destroys) as engine:
        wanted = engine.generate([ids], GREEDY)[0]
        for go_on in (engine.resume, engine.initiate):
            engine.pause()
            engine.pause()
            go_on()
            again = engine.generate([ids], GREEDY)[0]
            assert token_ids([again]) == token_ids([wanted])
            assert again.metrics is not None
            assert again.metrics["cached_tokens"] == (0 if destroys else 48)


def test_an_engine_that_is_paused_is_terminated_and_serves_again(
    engine: eSurge,
) -> None:  # holds S09
    wanted = token_ids(engine.generate(PROMPTS, GREEDY))
    engine.pause()
    engine.terminate()
    with pytest.raises(NotRunningError, match=r"initiate\(\)"):
        engine.generate(PROMPT)
    engine.initiate()
    assert token_ids(engine.generate(PROMPTS, GREEDY)) == wanted


def test_requests_are_counted_where_they_are(slow_engine: eSurge) -> None:  # holds S11
    assert slow_engine.esurge_name == "llama-0.00b"
    slow_engine.engine.before_step = lambda _: time.sleep(0.05)
    # 90 tokens fit into the pages of four rows: none of them is preempted.
    streams = [slow_engine.stream(PROMPT, with_(LONG, max_tokens=90)) for _ in range(6)]
    until(lambda: slow_engine.num_running_requests + slow_engine.num_pending_requests == 6)
    until(lambda: 4 in (slow_engine.num_running_requests, slow_engine.num_pending_requests))
    slow_engine.pause()
    counts = (slow_engine.num_running_requests, slow_engine.num_pending_requests)
    assert counts == (4, 2), "four rows run, and two requests wait for one"
    assert slow_engine.get_metrics_summary()["active_requests"] == 6
    slow_engine.resume()
    for stream in streams:
        stream.close()


def test_a_request_with_several_completions_counts_once(slow_engine: eSurge) -> None:  # holds S11
    slow_engine.engine.before_step = lambda _: time.sleep(0.05)
    stream = slow_engine.stream(PROMPT, with_(LONG, max_tokens=90, n=2))
    until(lambda: slow_engine.engine.rows.num_reqs == 2)
    slow_engine.pause()
    counts = (slow_engine.num_running_requests, slow_engine.num_pending_requests)
    assert counts == (1, 0), "both completions have a row"
    slow_engine.resume()
    stream.close()


def test_figures_are_each_engines_own(
    engine: eSurge, make_faked: Callable[..., eSurge]
) -> None:  # holds S15
    fresh = make_faked()
    assert list(fresh.get_metrics_summary()) == ["error"]
    before = engine.get_metrics_summary()
    fresh.initiate()
    others = fresh.get_metrics_summary()
    outputs = engine.generate(PROMPTS, GREEDY_ON)
    after = engine.get_metrics_summary()
    assert list(after) == [
        *("requests_per_second", "average_latency", "average_ttft", "average_throughput"),
        *("total_completed", "total_failed", "total_tokens"),
        *("total_draft_tokens", "total_accepted_tokens"),
        *("active_requests", "queue_size", "running_requests"),
    ]
    assert after["total_completed"] - before["total_completed"] == 4
    assert after["total_tokens"] - before["total_tokens"] == 64
    for name, values in {
        "average_latency": [output.processing_time for output in outputs],
        "average_ttft": [output.first_token_time or 0.0 for output in outputs],
        "average_throughput": [output.tokens_per_second for output in outputs],
    }.items():
        total, total_before = (one[name] * one["total_completed"] for one in (after, before))
        assert min(values) > 0
        assert total - total_before == pytest.approx(sum(values)), name
    assert after["requests_per_second"] > 0
    assert after["active_requests"] == after["queue_size"] == after["running_requests"] == 0
    assert fresh.get_metrics_summary() == others
    assert not any(others.values())


def test_an_extra_end_of_sequence_ends_a_request(
    engine: eSurge, make_faked: Callable[..., eSurge]
) -> None:  # holds S13
    params = with_(GREEDY, max_tokens=24)
    whole = engine.generate(PROMPT, params)[0]
    tokens = whole.outputs[0].token_ids
    end = next(token for i, token in enumerate(tokens[4:], 4) if token not in tokens[:i])
    with make_faked(extra_eos_token_ids=[end]) as fresh:
        ended = fresh.generate(PROMPT, params)[0].outputs[0]
        assert ended.token_ids == tokens[: tokens.index(end) + 1] == foretold(whole, (end,))
        assert ended.finish_reason == "stop"
        ignored = fresh.generate(PROMPT, with_(params, ignore_eos=True))[0].outputs[0]
        assert (ignored.token_ids, ignored.finish_reason) == (tokens, "length")


def test_weights_of_busy_engines_stay(slow_engine: eSurge) -> None:  # holds S17
    stream = slow_engine.stream(PROMPT, LONG)
    with pytest.raises(RuntimeError, match="1 requests") as caught:
        slow_engine.update_model_weights("demo")
    assert isinstance(caught.value, BusyError)
    stream.close()


def test_a_step_that_fails_ends_its_requests_and_the_service_goes_on(engine: eSurge) -> None:
    def fail(plan: StepPlan) -> None:
        raise RuntimeError("out of order")

    wanted = token_ids(engine.generate(PROMPTS, GREEDY))
    before = engine.get_metrics_summary()["total_failed"]
    engine.engine.before_step = fail
    with pytest.raises(InternalError, match="out of order"):
        engine.generate(PROMPT, GREEDY, "mine")
    engine.engine.before_step = lambda _: None
    assert engine.get_metrics_summary()["total_failed"] == before + 1
    assert engine.generate(PROMPT, GREEDY, "mine")[0].finished, "its id is free again"
    assert token_ids(engine.generate(PROMPTS, GREEDY)) == wanted


def test_requests_per_second_are_those_of_the_last_minute() -> None:  # holds S15
    now_s = [100.0]
    totals = Totals(lambda: now_s[0])
    totals.begin()
    now_s[0] += 50
    for _ in range(5):
        totals.completed(RequestOutput("", "", [], []))
    assert totals.summary()["requests_per_second"] == pytest.approx(0.1)
    now_s[0] += 61
    totals.completed(RequestOutput("", "", [], []))
    assert totals.summary()["requests_per_second"] == pytest.approx(1 / 60)
    assert totals.summary()["total_completed"] == 6


def test_observers_are_told_through_stops_and_starts_until_they_are_removed(engine: eSurge) -> None:
    class Updates(Watcher):
        count = 0

        def updated(self, update: Update) -> None:
            self.count += 1

    updates = Updates()
    engine.audience.add(updates)
    counts = []
    for _ in range(2):
        engine.generate(PROMPT, GREEDY)
        counts.append(updates.count)
        engine.terminate()
        engine.initiate()
    assert 0 < counts[0] < counts[1]
    engine.audience.remove(updates)
    engine.generate(PROMPT, GREEDY)
    assert updates.count == counts[1]
