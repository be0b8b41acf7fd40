"""Result queues of the DashInfer API: tokens, statuses and figures of a request."""

from __future__ import annotations

import threading
import time
import types
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from enginebay.errors import InternalError
from enginebay.outputs import RequestMetrics, StreamChunk
from enginebay.serving.events import RequestEnded
from enginebay.serving.prepare import Preparer
from enginebay_dashinfer.allspark import (
    AsStatus,
    DashInferModel,
    Engine,
    GenerateRequestStatus,
    ResultQueue,
)
from tests.unit.dashinfer.conftest import SUCCESS, greedy
from tests.unit.dashinfer.test_life_cycle import slow_down

Status = GenerateRequestStatus
GOING_ON = (Status.Init, Status.ContextFinished, Status.Generating)


def chunk(*token_ids: int, **fields: Any) -> StreamChunk:
    """An event with tokens."""
    return StreamChunk("r", 0, "", token_ids, **fields)


# holds D13
def test_a_status_moves_forward_and_the_documented_loop_reads_every_token(
    running: Engine,
) -> None:
    slow_down(running)
    _, _, results = running.start_request_ids("one", None, [5, 6], greedy(max_length=40))
    seen, generated = [results.GenerateStatus()], []
    status = seen[0]
    while status in GOING_ON:
        elements = results.Get()
        if elements is not None:
            generated += elements.ids_from_generate
        status = results.GenerateStatus()
        seen.append(status)
        if status is Status.GenerateFinished:
            break
    assert len(generated) == 38
    assert seen[0] is Status.Init
    assert seen[-1] is Status.GenerateFinished
    assert [one.value for one in seen] == sorted(one.value for one in seen)


# holds D13
def test_the_end_is_not_reported_before_the_last_tokens_were_read() -> None:
    results = ResultQueue(3, None)
    results.put(chunk(1))
    assert results.GenerateStatus() is Status.ContextFinished
    results.put(chunk(2, 3))
    results.put(RequestEnded("r", error=None))
    assert results.GenerateStatus() is Status.Generating, "two tokens are unread"
    assert results.Get().ids_from_generate == [1, 2, 3]
    assert results.GenerateStatus() is Status.GenerateFinished


def test_who_only_looks_at_the_status_sees_the_end() -> None:
    results = ResultQueue(3, None)
    results.put(chunk(1))
    results.put(RequestEnded("r", error=InternalError("broken")))
    statuses = [results.GenerateStatus() for _ in range(3)]
    assert statuses == [Status.ContextFinished, Status.InternalError, Status.InternalError]


# holds D12
def test_each_way_of_reading_returns_all_tokens_since_the_call_before() -> None:
    results = ResultQueue(3, None)
    assert results.GetNoWait() is None
    began_s = time.monotonic()
    assert results.GetWithTimeout(30) is None
    assert time.monotonic() - began_s >= 0.03
    results.put(chunk(1))
    results.put(chunk(2))
    assert results.GetNoWait().ids_from_generate == [1, 2]
    results.put(chunk(3))
    assert results.GetWithTimeout(1000).ids_from_generate == [3]
    assert results.GeneratedLength() == 3
    results.put(RequestEnded("r"))
    assert results.Get() is results.GetNoWait() is results.GetWithTimeout(10**6) is None


# holds D12
def test_a_reader_that_waits_is_woken_by_the_token() -> None:
    results, woken = ResultQueue(3, None), []
    reader = threading.Thread(target=lambda: woken.append(results.Get()))
    reader.start()
    time.sleep(0.02)
    assert not woken
    results.put(chunk(7))
    reader.join(5)
    assert woken[0].ids_from_generate == [7]


# holds D12
def test_figures_of_a_request_are_whole_numbers(running: Engine) -> None:
    before_ms = int(time.time() * 1e3)  # the figures are whole milliseconds, rounded down
    _, handle, results = running.start_request_ids("one", None, [5] * 40, greedy(max_length=60))
    running.sync_request("one", handle)
    first = results.RequestStatInfo()
    assert set(first) == {
        "arrival_time",
        "first_token_time",
        "last_token_time",
        "time_to_first_token",
        "time_in_queue",
        "finished_time",
        "context_token_length",
        "generated_token_length",
        "context_cached_length",
        "context_tps",
        "generate_tps",
    }
    assert all(type(one) is int for one in first.values())
    assert (first["context_token_length"], first["generated_token_length"]) == (40, 20)
    assert before_ms <= first["arrival_time"] <= first["first_token_time"]
    assert first["first_token_time"] <= first["last_token_time"]
    assert first["time_in_queue"] <= first["time_to_first_token"] <= first["finished_time"]


# holds D16
def test_every_figure_counts_from_the_arrival_of_the_request(
    running: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its queue is made later, as on a busy machine."""
    prepare_one = Preparer.prepare_one

    def slowly(*args: Any, **kwargs: Any) -> Any:
        made = prepare_one(*args, **kwargs)
        time.sleep(0.1)
        return made

    monkeypatch.setattr(Preparer, "prepare_one", slowly)
    _, handle, results = running.start_request_ids("one", None, [5] * 40, greedy(max_length=60))
    running.sync_request("one", handle)
    figures = results.RequestStatInfo()
    assert 100 <= figures["time_in_queue"] <= figures["time_to_first_token"]
    since_arrival = figures["first_token_time"] - figures["arrival_time"]
    assert abs(since_arrival - figures["time_to_first_token"]) <= 1


# holds D14, D16
def test_elements_say_how_much_of_the_prompt_was_cached(running: Engine) -> None:
    lengths = []
    for _ in range(2):
        _, _, results = running.start_request_ids("one", None, [5] * 40, greedy(max_length=60))
        results.wait()
        elements = results.Get()
        assert elements.prefix_cache_len == elements.prefix_len_gpu + elements.prefix_len_cpu
        assert elements.tensors_from_model_inference == {}
        lengths.append((elements.prefix_cache_len, results.RequestStatInfo()))
    assert lengths[0][0] == 0
    assert lengths[1][0] == lengths[1][1]["context_cached_length"] == 32


# holds D14
def test_cached_tokens_of_the_host_are_not_those_of_the_device() -> None:
    results = ResultQueue(3, None)
    metrics = RequestMetrics(num_cached_tokens=32, num_host_tokens=12)
    results.reader = types.SimpleNamespace(progress=metrics)  # type: ignore[assignment]
    results.put(chunk(4))
    elements = results.Get()
    assert (elements.prefix_len_gpu, elements.prefix_len_cpu) == (20, 12)
    assert elements.prefix_cache_len == 32


# holds D14
def test_log_probabilities_come_with_each_token() -> None:
    results = ResultQueue(3, 2)
    results.put(chunk(4, logprobs=({4: -3.0, 1: -0.5, 2: -1.0},)))
    elements = results.Get()
    assert elements.token_logprobs_list == [-3.0]
    assert elements.log_probs_list == [[(1, -0.5), (2, -1.0)]]


# holds D11
def test_a_request_that_is_stopped_keeps_its_tokens(running: Engine) -> None:
    slow_down(running)
    started = [running.start_request_ids("one", None, [5, i], greedy()) for i in range(8)]
    _, first, results = started[0]
    assert results.Get() is not None
    assert running.stop_request("one", first) is SUCCESS
    assert running.sync_request("one", first) is SUCCESS
    results.GetNoWait()
    assert results.GenerateStatus() is Status.GenerateFinished
    assert 0 < results.GeneratedLength() < 158
    _, waiting, pending = started[-1]
    assert running.stop_request("one", waiting) is SUCCESS
    assert running.sync_request("one", waiting) is SUCCESS
    assert pending.GenerateStatus() is Status.GenerateFinished
    for _, handle, _ in started[1:-1]:
        assert running.release_request("one", handle) is SUCCESS
        for call in (running.stop_request, running.release_request, running.sync_request):
            assert call("one", handle) is AsStatus.ALLSPARK_ILLEGAL_REQUEST_ID


# holds D10
def test_token_ids_may_be_lists_and_arrays(running: Engine) -> None:
    ids = [5, 6, 7]
    kinds = [ids, tuple(ids), np.asarray(ids), np.asarray(ids, np.uint32), jnp.asarray(ids)]
    made = []
    for given in kinds:
        status, _, results = running.start_request_ids("one", None, given, greedy(max_length=9))
        assert status is SUCCESS, running.last_error
        results.wait()
        made.append(results.Get().ids_from_generate)
    assert made.count(made[0]) == len(kinds)
    for wrong in ([ids], np.asarray([ids]), "abc", 5, np.asarray([1.5]), ["a"]):
        with pytest.raises(ValueError, match="Allowed"):
            running.start_request_ids("one", None, wrong, greedy())


# holds D10
def test_texts_start_a_request_each(running: Engine, loader: DashInferModel) -> None:
    call = running.start_request_text
    status, handle, results = call("one", loader, "Once upon a time", greedy(max_length=12))
    assert status is SUCCESS, running.last_error
    assert running.sync_request("one", handle) is SUCCESS
    whole = results.Get().ids_from_generate
    ids = loader.encode("Once upon a time")
    _, handle, results = running.start_request_ids("one", None, ids, greedy(max_length=12))
    assert running.sync_request("one", handle) is SUCCESS
    assert results.Get().ids_from_generate == whole
    texts = ["Once upon a time", "One day"]
    status, handles, queues = call("one", None, texts, greedy(max_length=12))
    assert status is SUCCESS, running.last_error
    assert running.sync_request("one", handles) is SUCCESS
    assert queues[0].Get().ids_from_generate == whole
    assert len(queues) == 2
    assert running.release_request("one", handles) is SUCCESS
    assert call("one", None, [], greedy())[0] is AsStatus.ALLSPARK_EMPTY_REQUEST
    for given in (None, loader):  # refused without being tokenised
        status, _, _ = call("one", given, "a" * 10**7, greedy())
        assert status is AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR
    status, handles, queues = call("one", None, ["x", 5], greedy())
    assert (status, handles, queues) == (AsStatus.ALLSPARK_PARAM_ERROR, None, None)
