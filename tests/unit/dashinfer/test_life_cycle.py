"""Models of a DashInfer engine: their states, and the status of every call."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from enginebay_dashinfer.allspark import AsStatus, Engine, GenerateRequestStatus
from enginebay_dashinfer.statuses import ModelState
from tests.unit.dashinfer.conftest import MAX_LENGTH, SUCCESS, Settings, greedy

INVALID_CALL = AsStatus.ALLSPARK_INVALID_CALL_ERROR
PARAM_ERROR = AsStatus.ALLSPARK_PARAM_ERROR
DENIED = AsStatus.ALLSPARK_REQUEST_DENIED


# holds D01
def test_models_have_unique_names_and_the_engine_a_version(
    engine: Engine, settings: Settings
) -> None:
    assert engine.install_model(settings("a")) is SUCCESS
    assert engine.install_model(settings("b")) is SUCCESS
    assert engine.install_model(settings("a")) is INVALID_CALL
    assert "'a'" in engine.last_error
    assert engine.model_names == ["a", "b"]
    assert engine.get_version_full() in repr(engine)
    assert engine.release_model("a") is SUCCESS
    assert engine.install_model(settings("a")) is SUCCESS, "a released name is free"


# holds D05
@pytest.mark.parametrize(
    ("field", "value", "status"),
    [
        ("model_name", "", PARAM_ERROR),
        ("model_path", "/nowhere/model.asgraph", AsStatus.ALLSPARK_IO_ERROR),
        ("weights_path", "/nowhere/model.asparam", AsStatus.ALLSPARK_IO_ERROR),
        ("compute_unit", "CUDA:0", PARAM_ERROR),
        ("compute_unit", "CPU_NUMA:0,1,2,3,4,5,6,7", PARAM_ERROR),
        ("compute_unit", "CPU", PARAM_ERROR),
        ("num_threads", 77, PARAM_ERROR),
        ("engine_max_length", 10**9, PARAM_ERROR),
    ],
)
def test_settings_that_cannot_be_used_are_a_status_with_a_reason(
    engine: Engine, settings: Settings, field: str, value: object, status: AsStatus
) -> None:
    wrong = settings()
    setattr(wrong, field, value)
    assert engine.install_model(wrong) is status
    assert engine.last_error
    assert engine.model_names == []


# holds D07
def test_a_model_goes_through_its_states_and_back_to_work(
    engine: Engine, settings: Settings
) -> None:
    def calls(expected: dict[str, AsStatus]) -> None:
        found = {name: getattr(engine, name)("one") for name in expected}
        assert found == expected

    def request() -> AsStatus:
        return engine.start_request_ids("one", None, [5, 6], greedy())[0]

    calls(dict.fromkeys(("start_model", "stop_model", "release_model"), PARAM_ERROR))
    assert request() is PARAM_ERROR
    assert engine.install_model(settings()) is SUCCESS
    calls({"stop_model": INVALID_CALL})
    assert request() is INVALID_CALL
    calls({"start_model": SUCCESS})
    calls({"start_model": INVALID_CALL, "release_model": INVALID_CALL})
    calls({"load_device_mem": INVALID_CALL, "unload_device_mem": INVALID_CALL})
    assert request() is SUCCESS
    calls({"stop_model": SUCCESS})
    calls({"stop_model": INVALID_CALL})
    assert request() is DENIED
    calls({"start_model": SUCCESS})
    assert request() is SUCCESS
    calls({"stop_model": SUCCESS, "release_model": SUCCESS})
    calls({"release_model": PARAM_ERROR})
    assert request() is PARAM_ERROR


# holds D20
def test_memory_can_be_freed_while_a_model_is_stopped(running: Engine) -> None:
    model = running._models["one"]  # the arrays of a model have no public name
    assert running.stop_model("one") is SUCCESS
    assert model.loaded is not None
    assert running.unload_device_mem("one") is SUCCESS
    assert model.loaded is None
    assert running.get_as_engine_stat("one").total_span == 0
    assert running.load_device_mem("one") is SUCCESS
    assert model.loaded is not None
    assert running.start_model("one") is SUCCESS
    status, _, results = running.start_request_ids("one", None, [5, 6], greedy(max_length=6))
    assert status is SUCCESS
    results.wait()
    assert results.GeneratedLength() == 4


def test_a_stop_interrupts_what_runs_and_waits_and_its_tokens_stay(running: Engine) -> None:
    slow_down(running)
    started = [running.start_request_ids("one", None, [5 + i, 6], greedy())[1:] for i in range(7)]
    while not started[0][1].GeneratedLength():
        time.sleep(0.001)
    assert running.stop_model("one") is SUCCESS
    for _, results in started:
        assert results.has_ended
        num = results.GeneratedLength()
        taken = results.GetNoWait()
        assert len(taken.ids_from_generate if taken else []) == num
        assert results.GenerateStatus() is GenerateRequestStatus.GenerateInterrupted
        assert results.Get() is None, "nothing waits after the end"
    assert running.sync_request("one", started[0][0]) is SUCCESS


# holds D13
def test_tokens_before_an_interrupt_and_a_new_request_continue_as_one(running: Engine) -> None:
    prompt = [5, 6, 7]
    whole = tokens_of(running, prompt, max_length=40)
    slow_down(running)
    _, _, results = running.start_request_ids("one", None, prompt, greedy(max_length=40))
    first = results.Get().ids_from_generate
    assert running.stop_model("one") is SUCCESS
    rest = results.GetNoWait()
    first += rest.ids_from_generate if rest else []
    assert 0 < len(first) < len(whole)
    assert running.start_model("one") is SUCCESS
    assert first + tokens_of(running, prompt + first, max_length=40) == whole


def test_a_model_that_cannot_start_leaves_nothing(
    engine: Engine, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no room")

    assert engine.install_model(settings()) is SUCCESS
    before = threading.active_count()
    with monkeypatch.context() as patch:
        patch.setattr("enginebay_dashinfer.installed.warm_up", fail)
        assert engine.start_model("one") is AsStatus.ALLSPARK_MEMORY_ERROR
    assert "no room" in engine.last_error
    assert engine._models["one"].state is ModelState.INITIAL
    assert threading.active_count() == before
    assert engine.start_model("one") is SUCCESS


def test_other_models_are_undisturbed(engine: Engine, settings: Settings) -> None:
    for name in ("a", "b"):
        assert engine.install_model(settings(name)) is SUCCESS
        assert engine.start_model(name) is SUCCESS
    slow_down(engine, "b")
    _, handle, results = engine.start_request_ids("b", None, [9, 8], greedy(max_length=30))
    assert engine.stop_model("a") is SUCCESS
    assert engine.release_model("a") is SUCCESS
    assert engine.stop_request("a", handle) is AsStatus.ALLSPARK_ILLEGAL_REQUEST_ID
    assert engine.sync_request("b", handle) is SUCCESS
    assert results.GenerateStatus() in (
        GenerateRequestStatus.Generating,
        GenerateRequestStatus.GenerateFinished,
    )
    assert results.GeneratedLength() == 28


def test_an_engine_that_is_dropped_ends_its_threads(settings: Settings, faked: None) -> None:
    before = threading.active_count()
    engine = Engine()
    assert engine.install_model(settings()) is SUCCESS
    assert engine.start_model("one") is SUCCESS
    assert threading.active_count() > before
    engine.close()
    assert threading.active_count() == before
    assert engine.start_model("one") is PARAM_ERROR


# holds D20
def test_file_information_has_the_version_that_wrote_it(
    engine: Engine, serialised: Path, tmp_path: Path
) -> None:
    prefix, older = serialised / "brief", tmp_path / "older.asgraph"
    info = engine.get_file_information(f"{prefix}.asgraph", f"{prefix}.asparam")
    assert info.create_version_graph == info.current_version_engine
    described = json.loads(Path(f"{prefix}.asgraph").read_text(encoding="utf-8"))
    older.write_text(json.dumps({**described, "enginebay": "0.0.1"}), encoding="utf-8")
    found = engine.get_file_information(str(older), f"{prefix}.asparam")
    assert (found.create_version_graph, found.create_version_param) == ("0.0.1", "0.0.1")
    assert found.current_version_engine == info.current_version_engine


def test_the_length_of_the_engine_is_the_limit(running: Engine) -> None:
    call = running.start_request_ids
    exceeded = AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR
    assert call("one", None, [1] * MAX_LENGTH, greedy())[0] is exceeded
    assert call("one", None, [1], greedy(max_length=MAX_LENGTH + 1))[0] is exceeded
    assert call("one", None, [1] * 10, greedy(max_length=10))[0] is exceeded
    assert call("one", None, [], greedy())[0] is AsStatus.ALLSPARK_EMPTY_REQUEST
    assert call("one", None, [-1], greedy())[0] is PARAM_ERROR
    assert call("one", None, [10**6], greedy())[0] is PARAM_ERROR


def slow_down(engine: Engine, name: str = "one") -> None:
    """Let every step of a fake engine take a while."""
    loaded = engine._models[name].loaded
    assert loaded is not None
    loaded.service.parts.engine.before_step = lambda _: time.sleep(0.01)


def tokens_of(engine: Engine, prompt: list[int], max_length: int) -> list[int]:
    """The tokens of a request of the model "one"."""
    status, _, results = engine.start_request_ids(
        "one", None, prompt, greedy(max_length=max_length)
    )
    assert status is SUCCESS, engine.last_error
    results.wait()
    taken = results.GetNoWait()
    return list(taken.ids_from_generate)
