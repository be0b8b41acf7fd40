"""What fields of a generation do to the tokens of a request, and requests that end early."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from enginebay_dashinfer.allspark import (
    ASGenerationConfigBuilder,
    AsStatus,
    Engine,
    GenerateRequestStatus,
    MultiMediaInfo,
    ResultQueue,
)
from tests.adapters import write_adapter
from tests.brief import BRIEF
from tests.unit.dashinfer.conftest import SUCCESS, Settings, greedy
from tests.unit.dashinfer.test_life_cycle import slow_down, tokens_of

PROMPT = [5, 6, 7]


def generated(engine: Engine, ids: list[int], builder: ASGenerationConfigBuilder) -> list[int]:
    """The tokens of a request, read one by one."""
    status, handle, results = engine.start_request_ids("one", None, ids, builder)
    assert status is SUCCESS, engine.last_error
    tokens: list[int] = []
    while (elements := results.Get()) is not None:
        tokens += elements.ids_from_generate
    assert engine.release_request("one", handle) is SUCCESS
    return tokens


# holds D09
def test_a_stop_word_ends_the_output_wherever_the_reader_is(running: Engine) -> None:
    slow_down(running)
    whole = tokens_of(running, PROMPT, max_length=23)
    words = whole[4:7]
    found = generated(running, PROMPT, greedy(max_length=23, stop_words_ids=[[1], words]))
    assert found in (whole[:4], whole[:7])
    straddling = [PROMPT[-1], whole[0]]
    assert generated(running, PROMPT, greedy(max_length=23, stop_words_ids=[straddling])) == whole
    late = greedy(max_length=23, stop_words_ids=[[whole[5], whole[4]]])
    assert generated(running, PROMPT, late) == whole, "only the whole word counts"


# holds D09
def test_the_end_token_ends_the_output_unless_early_stopping_is_off(running: Engine) -> None:
    whole = tokens_of(running, PROMPT, max_length=23)
    ends = greedy(max_length=23, early_stopping=True, eos_token_id=whole[6])
    assert generated(running, PROMPT, ends) in (whole[:6], whole[:7])
    goes_on = greedy(max_length=23, early_stopping=False, eos_token_id=whole[6])
    assert generated(running, PROMPT, goes_on) == whole


# holds D09
def test_equal_seeds_give_equal_tokens_whatever_runs_beside_them(running: Engine) -> None:
    def hot(seed: int) -> list[int]:
        builder = ASGenerationConfigBuilder(seed=seed).temperature(1.0).early_stopping(False)
        return generated(running, PROMPT, builder.max_length(30))

    first = hot(11)
    mates = [running.start_request_ids("one", None, [9, i], greedy())[1] for i in range(3)]
    assert hot(11) == first
    assert hot(12) != first
    assert running.release_request("one", mates) is SUCCESS


# holds D16
def test_prefixes_are_cached_by_default_and_not_when_the_cache_is_off(
    engine: Engine, settings: Settings
) -> None:
    for name, changes in (("on", {}), ("off", {"enable_prefix_cache": False})):
        assert engine.install_model(settings(name, **changes)) is SUCCESS
        assert engine.start_model(name) is SUCCESS
    cached = {
        name: [cached_length(engine, name, [5] * 40) for _ in range(2)] for name in ("on", "off")
    }
    assert cached == {"on": [0, 32], "off": [0, 0]}


# holds D16
def test_prefixes_return_from_the_memory_of_the_host(
    engine: Engine, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    for ratio in ("1.5", "x"):
        monkeypatch.setenv("CPU_CACHE_RATIO", ratio)
        assert engine.install_model(settings()) is AsStatus.ALLSPARK_PARAM_ERROR
        assert "CPU_CACHE_RATIO" in engine.last_error
    for ratio, lengths in (("0", (0, 0)), ("0.001", (0, 144))):
        monkeypatch.setenv("CPU_CACHE_RATIO", ratio)
        name = f"ratio {ratio}"
        assert engine.install_model(settings(name, engine_max_batch=1)) is SUCCESS
        assert engine.start_model(name) is SUCCESS, engine.last_error
        for token in (5, 6, 5):  # the cache has room for one of the prompts
            prompt = [token] * 150
            _, _, results = engine.start_request_ids(name, None, prompt, greedy(max_length=155))
            results.wait()
            found = results.Get()
        assert (found.prefix_len_gpu, found.prefix_len_cpu) == lengths
        assert found.prefix_cache_len == sum(lengths)
        assert engine.get_as_engine_stat(name).prefix_cache_cpu_hit_token == lengths[1]


# holds D18
def test_requests_share_prefixes_only_with_equal_embeddings(running: Engine) -> None:
    ids = [9] * 40 + [5]
    width = running._models["one"].plan.model.info.hidden_size
    first, second = (np.full((40, width), value, np.float32) for value in (0.5, 0.25))
    changed = first.copy()
    changed[3, 7] += 1e-3

    def cached(content: np.ndarray | None) -> int:
        builder = greedy(max_length=44)
        if content is not None:
            media = MultiMediaInfo()
            assert media.add_multimedia_content("9", [content]) is SUCCESS
            builder.mm_info(media)
        return cached_length(running, "one", ids, builder)

    assert [cached(first), cached(first), cached(second), cached(changed)] == [0, 32, 0, 0]
    assert [cached(None), cached(None), cached(second)] == [0, 32, 32]


def cached_length(
    engine: Engine, name: str, ids: list[int], builder: ASGenerationConfigBuilder | None = None
) -> int:
    """The number of prompt tokens of a request that were in the cache."""
    status, handle, results = engine.start_request_ids(
        name, None, ids, builder or greedy(max_length=44)
    )
    assert status is SUCCESS, engine.last_error
    assert engine.sync_request(name, handle) is SUCCESS
    assert results.error is None
    return int(results.RequestStatInfo()["context_cached_length"])


# holds D11, D13
def test_a_stop_before_the_first_token_finishes_the_request_without_tokens(running: Engine) -> None:
    goes_on = threading.Event()
    loaded = running._models["one"].loaded
    assert loaded is not None
    loaded.service.parts.engine.before_step = lambda _: goes_on.wait(10)  # type: ignore[attr-defined]
    began_s = time.monotonic()
    status, handle, results = running.start_request_ids("one", None, PROMPT, greedy())
    assert status is SUCCESS
    assert time.monotonic() - began_s < 5, "a start does not wait for tokens"
    assert results.GenerateStatus() is GenerateRequestStatus.Init
    assert results.GetNoWait() is None
    assert running.stop_request("one", handle) is SUCCESS
    goes_on.set()
    assert running.sync_request("one", handle) is SUCCESS
    taken = results.Get()
    assert len(taken.ids_from_generate if taken else []) == results.GeneratedLength() <= 4
    assert results.GenerateStatus() is GenerateRequestStatus.GenerateFinished
    assert running.release_request("one", handle) is SUCCESS


# holds D11
def test_a_sync_waits_for_the_end(running: Engine) -> None:
    slow_down(running)
    _, handle, results = running.start_request_ids("one", None, PROMPT, greedy(max_length=40))
    assert not results.has_ended
    assert running.sync_request("one", handle) is SUCCESS
    assert results.has_ended
    assert results.GeneratedLength() == 37


# holds D07, D17
def test_each_refusal_of_an_adapter_has_its_status(
    engine: Engine, settings: Settings, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "a", BRIEF, targets=["q_proj"])
    wide = write_adapter(tmp_path / "b", BRIEF, targets=["q_proj"], rank=9)
    assert engine.install_model(settings(lora_max_num=1, lora_max_rank=8)) is SUCCESS
    assert engine.install_model(settings("none")) is SUCCESS
    assert engine.load_lora("one", "a", str(folder)) is SUCCESS, "before the start"
    assert engine.start_model("one") is SUCCESS
    calls = {
        "ALREADY_LOADED": lambda: engine.load_lora("one", "a", str(folder)),
        "RANK_EXCEED_LIMIT_ERROR": lambda: engine.load_lora("one", "b", str(wide)),
        "NUM_EXCEED_LIMIT_ERROR": lambda: engine.load_lora("none", "a", str(folder)),
        "NOT_FOUND": lambda: engine.unload_lora("one", "b"),
    }
    for name, call in calls.items():
        assert call().name == f"ALLSPARK_LORA_{name}", engine.last_error
    assert engine.load_lora("one", "c", "/nowhere") is AsStatus.ALLSPARK_IO_ERROR
    call = engine.start_request_ids
    assert call("one", None, PROMPT, greedy(lora_name="b"))[0] is AsStatus.ALLSPARK_LORA_NOT_FOUND
    slow_down(engine)
    status, handle, _ = call("one", None, PROMPT, greedy(lora_name="a"))
    assert status is SUCCESS, engine.last_error
    assert engine.unload_lora("one", "a") is AsStatus.ALLSPARK_LORA_IN_USE
    assert engine.stop_request("one", handle) is SUCCESS
    assert engine.sync_request("one", handle) is SUCCESS
    assert engine.unload_lora("one", "a") is SUCCESS, engine.last_error
    assert call("one", None, PROMPT, greedy(lora_name="a"))[0] is AsStatus.ALLSPARK_LORA_NOT_FOUND


# holds D17, D20
def test_adapters_come_back_with_the_memory_of_their_model(
    engine: Engine, settings: Settings, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "a", BRIEF, targets=["q_proj"])
    assert engine.install_model(settings(lora_max_num=1, lora_max_rank=8)) is SUCCESS
    assert engine.load_lora("one", "a", str(folder)) is SUCCESS
    for _ in range(2):
        assert engine.start_model("one") is SUCCESS, engine.last_error
        tokens = generated(engine, PROMPT, greedy(max_length=9, lora_name="a"))
        assert len(tokens) == 6
        loaded = engine._models["one"].loaded
        assert loaded is not None
        slots = loaded.service.parts.engine.written_slots  # type: ignore[attr-defined]
        assert slots == [0], "the adapter is written to the slots of the new engine"
        assert engine.stop_model("one") is SUCCESS
        assert engine.unload_device_mem("one") is SUCCESS


def test_queues_of_a_released_model_stay_readable(running: Engine) -> None:
    _, handle, results = running.start_request_ids("one", None, PROMPT, greedy(max_length=12))
    assert isinstance(results, ResultQueue)
    assert running.sync_request("one", handle) is SUCCESS
    assert running.stop_model("one") is SUCCESS
    assert running.release_model("one") is SUCCESS
    assert not running._requests
    assert running.release_request("one", handle) is AsStatus.ALLSPARK_ILLEGAL_REQUEST_ID
    assert len(results.Get().ids_from_generate) == 9
