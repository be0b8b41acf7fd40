"""Wrong values for every public method of the DashInfer API: a status or a ValueError, and a
service that goes on.
"""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginebay_dashinfer.allspark import (
    ASGenerationConfigBuilder,
    AsModelConfig,
    AsModelRuntimeConfigBuilder,
    AsStatus,
    DashInferModel,
    Engine,
    HuggingFaceModel,
    MultiMediaInfo,
    ResultQueue,
)
from tests.unit.dashinfer.conftest import SUCCESS, Settings, greedy
from tests.unit.dashinfer.test_life_cycle import slow_down, tokens_of

ODD: tuple[Any, ...] = (
    None, True, -1, 0, 2**31, 2**63, 10**40, 1.5, float("nan"), float("inf"), -0.0, 1j,
    "", "one\0", "other", "x" * 10_000, "../..", "é\ud800", b"one", bytearray(9),
    [], [[]], [None], ["one"], [1, [2]], [-1], [2**40], [True], [1.0], (), (1,), {}, {"a": 1},
    {"input_ids": None}, {1: 2}, {1, 2}, frozenset(), range(3), range(10**6), slice(1), object(),
    type, len, Exception("x"), NotImplemented, ..., iter([1]), np.array([]), np.array(5),
    np.array([[1]]), np.array([1.5]), np.array(["a"]), np.array([None]), np.float32("nan"),
    np.zeros((2, 0)), memoryview(b"ab"), Path("/nowhere"), Path("/proc/self/mem"), AsStatus,
    AsModelConfig(), MultiMediaInfo(),
)  # fmt: skip
"""Values that are wrong for almost every parameter."""

UNKNOWN = AsStatus.ALLSPARK_UNKNOWN_ERROR


def engine_calls(engine: Engine, odd: Any) -> Iterator[Callable[[], object]]:
    """Calls of every method of an engine with an odd value in each place."""
    right: dict[str, tuple[Any, ...]] = {
        "install_model": (AsModelConfig(),),
        "build_model_from_config_struct": (AsModelConfig(),),
        "start_model": ("one",),
        "stop_model": ("nothing",),
        "release_model": ("one",),
        "load_device_mem": ("one",),
        "unload_device_mem": ("one",),
        "load_lora": ("one", "a", "/nowhere"),
        "unload_lora": ("one", "a"),
        "start_request_ids": ("one", None, [5], greedy(max_length=9)),
        "start_request_text": ("one", None, "a", greedy(max_length=9)),
        "start_request": ("one", {"input_ids": [5]}, {}),
        "stop_request": ("one", None),
        "sync_request": ("one", None),
        "release_request": ("one", None),
        "get_as_engine_stat": ("one",),
        "get_op_profiling_info": ("one",),
        "get_file_information": ("/nowhere", "/nowhere"),
    }
    for name, values in right.items():
        for place in range(len(values)):
            changed = list(values)
            changed[place] = odd
            yield lambda name=name, changed=changed: getattr(engine, name)(*changed)


def check(call: Callable[[], object], what: object) -> object:
    """Run a call: it returns, or raises an error for wrong input; no status is the unknown one."""
    try:
        result = call()
    except (ValueError, TypeError):
        return None
    status = result[0] if isinstance(result, tuple) and result else result
    assert status is not UNKNOWN, what
    return result


def release_started(engine: Engine, result: object) -> None:
    """Release the request of a call that accepted an odd value."""
    if isinstance(result, tuple) and result and result[0] is SUCCESS:
        assert engine.release_request("one", result[1]) is SUCCESS


def hammer(engine: Engine, values: tuple[Any, ...]) -> None:
    """Make all calls of an engine with these values."""
    for odd in values:
        for call in engine_calls(engine, odd):
            release_started(engine, check(call, (odd, engine.last_error)))


@pytest.mark.parametrize("state", ["nothing", "installed", "running", "stopped", "closed"])
def test_wrong_values_are_refused_in_every_state(
    engine: Engine, settings: Settings, state: str
) -> None:
    if state != "nothing":
        assert engine.install_model(settings(lora_max_num=1, lora_max_rank=8)) is SUCCESS
    if state in ("running", "stopped", "closed"):
        assert engine.start_model("one") is SUCCESS
    if state == "stopped":
        assert engine.stop_model("one") is SUCCESS
    if state == "closed":
        engine.close()
    hammer(engine, ODD if state == "running" else ODD[::4])
    assert not engine._requests
    assert engine.model_names in ([], ["one"])


def test_a_service_survives_wrong_calls_from_several_threads(running: Engine) -> None:
    expected, ended = tokens_of(running, [5, 6, 7], max_length=30), []
    num_threads = threading.active_count()

    def attack(part: int) -> None:
        hammer(running, ODD[part::4])
        ended.append(part)

    threads = [threading.Thread(target=attack, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert tokens_of(running, [5, 6, 7], max_length=30) == expected
    assert len(ended) == len(threads)
    stat = running.get_as_engine_stat("one")
    assert (stat.pendding_request, stat.running_request) == (0, 0)
    assert threading.active_count() == num_threads


def test_builders_queues_and_loaders_refuse_wrong_values(serialised: Path) -> None:
    results, media = ResultQueue(1, None), MultiMediaInfo()
    loader = DashInferModel(serialised, "brief")
    config = AsModelRuntimeConfigBuilder()
    setters = [
        "model_name", "compute_unit", "max_length", "max_batch", "max_prefill_length",
        "kv_cache_mode", "kv_cache_span_size", "prefill_cache", "prefix_cache_ttl",
        "lora_max_num", "lora_max_rank", "from_dict", "update_from_dict",
    ]  # fmt: skip
    reference = loader.create_reference_runtime_config_builder
    for odd in ODD:
        for name in setters:
            check(lambda name=name, odd=odd: getattr(config, name)(odd), (name, odd))
        calls: dict[str, Callable[[Any], object]] = {
            "field": lambda odd: config.update_from_dict({odd: odd}),
            "unit": lambda odd: config.update_from_dict({"compute_unit": odd}),
            "ids": lambda odd: config.compute_unit("cpu", odd),
            "threads": lambda odd: config.compute_unit("cpu", [0], odd),
            "folder": lambda odd: config.model_dir(odd, "x"),
            "update": lambda odd: ASGenerationConfigBuilder().update(odd),
            "hf": ASGenerationConfigBuilder,
            "media": lambda odd: media.add_multimedia_content(odd, [np.ones((1, 4), np.float32)]),
            "rows": lambda odd: media.add_multimedia_content(9, odd),
            "row": lambda odd: media.add_multimedia_content(9, [odd]),
            "name": lambda odd: HuggingFaceModel("x", odd),
            "dtype": lambda odd: HuggingFaceModel("x", "x", user_set_data_type=odd),
            "side": loader.init_tokenizer,
            "target": lambda odd: reference("m", odd, [0], 8, 64),
            "batch": lambda odd: reference("m", "cpu", [0], odd, 64),
            "runtime": loader.create_reference_generation_config_builder,
        }
        for name, call in calls.items():
            check(lambda call=call, odd=odd: call(odd), (name, odd))
        if not isinstance(odd, int | float) or odd != odd or odd <= 0:
            check(lambda odd=odd: results.GetWithTimeout(odd), ("timeout", odd))
    assert isinstance(config.build().engine_max_length, int)
    for odd in ODD[::8]:
        with pytest.raises((ValueError, TypeError)):
            HuggingFaceModel(odd, "x").load_model()


def test_every_field_of_a_generation_refuses_wrong_values(running: Engine) -> None:
    setters = {name for name in vars(ASGenerationConfigBuilder) if not name.startswith("_")}
    for name, odd in itertools.product(sorted(setters - {"build", "update"}), ODD):
        builder = greedy(max_length=9)
        getattr(builder, name)(*[odd] * (2 if name == "log_probs" else 1))
        result = running.start_request_ids("one", None, [5], builder)
        assert result[0] is not UNKNOWN, (name, odd, running.last_error)
        release_started(running, result)
    assert not running._requests


# holds D11
@pytest.mark.long
def test_a_release_while_a_request_generates_frees_its_pages(running: Engine) -> None:
    slow_down(running)
    free = running.get_as_engine_stat("one").free_span
    started = [running.start_request_ids("one", None, [5 + i] * 20, greedy())[1:] for i in range(6)]
    assert started[0][1].Get() is not None
    assert running.get_as_engine_stat("one").free_span < free
    for handle, _ in started:
        assert running.release_request("one", handle) is SUCCESS
    for _, results in started:
        results.wait()
        assert results.GeneratedLength() < 100, "it did not run to its end"
    while (stat := running.get_as_engine_stat("one")).running_request:
        pass
    assert (stat.pendding_request, stat.free_span) == (0, free)
    assert not running._requests
    queues = [weakref.ref(results) for _, results in started]
    del started, results
    gc.collect()
    assert not any(one() for one in queues), "nothing holds the queue of a released request"


def test_a_broken_step_ends_its_requests_and_the_model_starts_again(running: Engine) -> None:
    expected = tokens_of(running, [5, 6], max_length=20)
    loaded = running._models["one"].loaded
    assert loaded is not None
    engine: Any = loaded.service.parts.engine
    count = itertools.count()

    def break_down(_: object) -> None:
        if next(count) == 3:
            raise RuntimeError("a broken device")

    engine.before_step = break_down
    status, handle, results = running.start_request_ids("one", None, [5, 6], greedy())
    assert status is SUCCESS
    assert running.sync_request("one", handle) is SUCCESS
    results.GetNoWait()
    assert results.GenerateStatus().name == "InternalError"
    status = running.start_request_ids("one", None, [5, 6], greedy(max_length=20))[0]
    assert status in (SUCCESS, AsStatus.ALLSPARK_REQUEST_DENIED, AsStatus.ALLSPARK_RUNTIME_ERROR)
    assert running.stop_model("one") is SUCCESS
    assert running.start_model("one") is SUCCESS, running.last_error
    assert tokens_of(running, [5, 6], max_length=20) == expected
