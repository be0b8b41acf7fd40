"""eSurge as a service: started, paused and stopped; its figures; and other weights in place."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from enginebay.errors import StoppedError
from enginebay_esurge import BusyError, NotRunningError, eSurge
from tests.unit.esurge.small import GREEDY, GREEDY_ON, LONG, PROMPT, PROMPTS, token_ids, until, with_

pytestmark = pytest.mark.xdist_group("esurge")


def test_an_engine_that_was_not_initiated_serves_nobody(
    shrunk: tuple[eSurge, int, list[int]],
) -> None:  # holds S09
    fresh, _, _ = shrunk
    fresh.terminate()
    for call in (fresh.generate, fresh.stream, fresh.chat):
        with pytest.raises(RuntimeError, match="initiate") as caught:
            call(PROMPT if call != fresh.chat else [{"role": "user", "content": "x"}])
        assert isinstance(caught.value, NotRunningError)
    fresh.pause()
    fresh.abort_request("unknown")
    assert len(fresh._serving.active) == fresh.num_pending_requests == fresh.num_running_requests == 0


def test_initiating_twice_is_once_and_idling_costs_nothing(engine: eSurge) -> None:  # holds S09
    thread = engine._service._loop._thread  # type: ignore[union-attr]
    engine.initiate()
    assert engine._service._loop._thread is thread  # type: ignore[union-attr]
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
    count = slow_engine._service.parts.engine.compilations.count
    thread = slow_engine._service._loop._thread  # type: ignore[union-attr]
    updates = slow_engine.stream(PROMPT, LONG)
    next(updates)
    slow_engine.terminate()
    slow_engine.terminate()
    assert not thread.is_alive()
    with pytest.raises(StoppedError):
        list(updates)
    slow_engine.initiate()
    assert token_ids(slow_engine.generate(PROMPTS, GREEDY)) == wanted
    assert slow_engine._service.parts.engine.compilations.count == count


def test_pausing_keeps_what_is_under_way(slow_engine: eSurge) -> None:  # holds S09
    wanted = slow_engine.generate(PROMPT, LONG)[0]
    streams = [slow_engine.stream(PROMPT, LONG, f"p{i}") for i in range(6)]
    until(lambda: slow_engine.num_running_requests)
    slow_engine.pause()
    held = (slow_engine.num_running_requests, slow_engine.num_pending_requests)
    assert sum(held) == 6
    time.sleep(0.1)
    assert (slow_engine.num_running_requests, slow_engine.num_pending_requests) == held
    with pytest.raises(NotRunningError, match="resume"):
        slow_engine.generate(PROMPT)
    assert slow_engine._service.parts.engine.runner.has_state, "rows are running: their cache stays"
    for request_id in ("p5", "p0"):
        slow_engine.abort_request(request_id)
    until(lambda: slow_engine.num_running_requests + slow_engine.num_pending_requests == 4)
    slow_engine.resume()
    lasts = [list(stream)[-1] for stream in streams]
    reasons = [last.outputs[0].finish_reason for last in lasts]
    assert reasons == ["abort", "length", "length", "length", "length", "abort"]
    assert token_ids(lasts[1:5]) == token_ids([wanted]) * 4


def test_an_idle_pause_frees_the_cache(engine: eSurge) -> None:  # holds S09
    wanted = token_ids(engine.generate(PROMPTS, GREEDY))
    runner = engine._service.parts.engine.runner
    for go_on in (engine.resume, engine.initiate):
        engine.pause()
        engine.pause()
        assert not runner.has_state
        go_on()
        assert token_ids(engine.generate(PROMPTS, GREEDY)) == wanted
    engine.pause()
    engine.terminate()
    engine.initiate()
    assert token_ids(engine.generate(PROMPTS, GREEDY)) == wanted


def test_requests_are_counted_where_they_are(slow_engine: eSurge) -> None:  # holds S11
    assert slow_engine.esurge_name == "llama-0.00b"
    streams = [slow_engine.stream(PROMPT, LONG) for _ in range(6)]
    until(lambda: slow_engine.num_running_requests == 4 or not slow_engine.num_pending_requests)
    slow_engine.pause()
    assert slow_engine.num_running_requests + slow_engine.num_pending_requests == 6
    assert slow_engine.get_metrics_summary()["active_requests"] == 6
    slow_engine.resume()
    for stream in streams:
        stream.close()


def test_figures_are_each_engines_own(
    engine: eSurge, shrunk: tuple[eSurge, int, list[int]]
) -> None:  # holds S15
    fresh = shrunk[0]
    if not fresh._serving.totals.has_begun:
        assert list(fresh.get_metrics_summary()) == ["error"]
    before = engine.get_metrics_summary()
    fresh.initiate()
    others = fresh.get_metrics_summary()
    engine.generate(PROMPTS, GREEDY_ON)
    after = engine.get_metrics_summary()
    assert list(after) == [
        *("requests_per_second", "average_latency", "average_ttft", "average_throughput"),
        *("total_completed", "total_failed", "total_tokens"),
        *("total_draft_tokens", "total_accepted_tokens"),
        *("active_requests", "queue_size", "running_requests"),
    ]
    assert after["total_completed"] - before["total_completed"] == 4
    assert after["total_tokens"] - before["total_tokens"] == 64
    assert 0 < after["average_ttft"] < after["average_latency"]
    assert after["requests_per_second"] > 0 < after["average_throughput"]
    assert after["active_requests"] == after["queue_size"] == after["running_requests"] == 0
    assert fresh.get_metrics_summary()["total_completed"] == others["total_completed"]
    fresh.terminate()


def test_an_extra_end_of_sequence_ends_a_request(shrunk: tuple[eSurge, int, list[int]]) -> None:  # holds S13
    fresh, end, tokens = shrunk
    with fresh:
        ended = fresh.generate(PROMPT, with_(GREEDY, max_tokens=24))[0].outputs[0]
        assert ended.token_ids == tokens[: tokens.index(end) + 1]
        assert ended.finish_reason == "stop"
        ignored = fresh.generate(PROMPT, with_(GREEDY_ON, max_tokens=24))[0].outputs[0]
        assert (ignored.token_ids, ignored.finish_reason) == (tokens, "length")


def test_new_weights_give_what_a_fresh_engine_gives_and_compile_nothing(
    engine: eSurge, shrunk: tuple[eSurge, int, list[int]], shrink: Callable[[eSurge], dict[str, Any]]
) -> None:  # holds S17
    ids = list(range(500, 560))
    params = with_(GREEDY_ON, max_tokens=8)
    old = engine.generate([ids], params)[0]
    with shrunk[0] as fresh:
        wanted = fresh.generate([ids], params)[0]
    assert token_ids([wanted]) != token_ids([old])
    count = engine._service.parts.engine.compilations.count
    engine.update_model_weights(graphstate=shrink(engine))
    new = engine.generate([ids], params)[0]
    assert token_ids([new]) == token_ids([wanted])
    assert new.metrics is not None
    assert new.metrics["cached_tokens"] == 0, "nothing is found of what the old weights computed"
    engine.terminate()
    engine.update_model_weights("demo")
    assert not engine._service.is_running, "it did not run before"
    engine.initiate()
    assert token_ids(engine.generate([ids], params)) == token_ids([old])
    assert engine._service.parts.engine.compilations.count == count
    engine.update_model_weights("demo", restart_scheduler=False)
    assert not engine._service.is_running
    engine.initiate()


def test_weights_that_do_not_fit_and_busy_engines_are_refused(slow_engine: eSurge) -> None:  # holds S17
    wanted = token_ids(slow_engine.generate(PROMPT, GREEDY))
    with pytest.raises(ValueError, match="no weights"):
        slow_engine.update_model_weights()
    path, weight = next(iter(slow_engine._service.parts.engine.runner.weights.items()))
    for wrong in ({"no.such": weight}, {path: np.zeros((3, 3), np.float32)}):
        with pytest.raises(ValueError, match="weight"):
            slow_engine.update_model_weights(graphother=wrong)
    stream = slow_engine.stream(PROMPT, LONG)
    with pytest.raises(RuntimeError, match="1 requests") as caught:
        slow_engine.update_model_weights("demo")
    assert isinstance(caught.value, BusyError)
    stream.close()
    assert token_ids(slow_engine.generate(PROMPT, GREEDY)) == wanted
