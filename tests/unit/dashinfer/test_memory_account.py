"""The account of memory of a DashInfer engine's models: sizes, refusals, and models that start at
the same time.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from enginebay.errors import ConfigError
from enginebay.memory import MemoryPlan
from enginebay_dashinfer import memory
from enginebay_dashinfer.allspark import AsStatus, Engine
from enginebay_dashinfer.loaded import Loaded
from enginebay_dashinfer.planning import plan_model
from enginebay_dashinfer.statuses import RefusedError
from tests.fake_engine import FakeEngine
from tests.unit.dashinfer.conftest import MAX_LENGTH, SUCCESS, Settings, greedy
from tests.unit.dashinfer.test_life_cycle import tokens_of

ROW_PAGES = MAX_LENGTH // 16
PAGE_BYTES = 4 * 16
"""Bytes of a page of a fake engine, whose weights and steps take no memory."""

LEAST_BYTES, WHOLE_BYTES = (1 + ROW_PAGES) * PAGE_BYTES, (1 + 4 * ROW_PAGES) * PAGE_BYTES

SetFree = Callable[[int], None]


@dataclasses.dataclass
class FakeDevice:
    """A device that reports its memory. `limit` None: it reports nothing, as a CPU."""

    limit: int | None = None
    in_use: int = 0
    platform: str = "cuda"

    def memory_stats(self) -> dict[str, int] | None:
        return (
            None if self.limit is None else {"bytes_limit": self.limit, "bytes_in_use": self.in_use}
        )


@pytest.fixture
def set_free(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> SetFree:
    """Sets the bytes of a device that are free without models. A loaded model has WHOLE_BYTES."""
    monkeypatch.setenv("BFC_MEM_RATIO", "1")

    def set_free(total: int) -> None:
        def free(*_: object) -> int:
            held = [one.plan.cache_bytes for one in engine._memory._taken.values()]
            return total - sum(held)

        monkeypatch.setattr(memory, "free_bytes", free)

    return set_free


# holds D05, D06
def test_a_model_that_does_not_fit_beside_another_is_refused_with_the_missing_bytes(
    engine: Engine, settings: Settings, set_free: SetFree
) -> None:
    set_free(WHOLE_BYTES + LEAST_BYTES - 100)
    for name in ("a", "b"):
        assert engine.install_model(settings(name)) is SUCCESS
    assert engine.start_model("a") is SUCCESS, engine.last_error
    for call in (engine.start_model, engine.load_device_mem):
        assert call("b") is AsStatus.ALLSPARK_CACHE_MEMORY_OUT
        assert f"needs {LEAST_BYTES} bytes" in engine.last_error
        assert "100 bytes are missing" in engine.last_error
        assert f"at most {LEAST_BYTES - 100} bytes" in engine.last_error
    status, handle, results = engine.start_request_ids("a", None, [5, 6], greedy(max_length=12))
    assert status is SUCCESS, "the other model is undisturbed"
    assert engine.sync_request("a", handle) is SUCCESS
    assert results.GeneratedLength() == 10
    assert engine.stop_model("a") is SUCCESS
    assert engine.start_model("b") is not SUCCESS, "a stopped model stays in memory"
    assert engine.unload_device_mem("a") is SUCCESS
    assert engine.start_model("b") is SUCCESS, engine.last_error
    assert engine.start_model("a") is AsStatus.ALLSPARK_CACHE_MEMORY_OUT


# holds D06
def test_the_cache_takes_what_fits_and_serves_a_request_of_the_max_length(
    engine: Engine, settings: Settings, set_free: SetFree
) -> None:
    set_free(LEAST_BYTES + 7 * PAGE_BYTES + PAGE_BYTES - 1)
    assert engine.install_model(settings()) is SUCCESS
    assert engine.start_model("one") is SUCCESS, engine.last_error
    stat = engine.get_as_engine_stat("one")
    assert stat.total_span == ROW_PAGES + 7
    assert stat.total_device_memory_pool_size == LEAST_BYTES + 7 * PAGE_BYTES
    assert len(tokens_of(engine, [5], max_length=MAX_LENGTH)) == MAX_LENGTH - 1


# holds D06
def test_prefixes_in_the_memory_of_the_host_count_too(
    engine: Engine, settings: Settings, set_free: SetFree, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_model(settings())
    options = plan.config.engine.options | {"prefix_host_bytes": 20_000}
    tiered = plan.config.engine.model_copy(update={"options": options})
    config = plan.config.model_copy(update={"engine": tiered})
    set_free(LEAST_BYTES + 19_999)
    account = memory.ModelMemory()
    with pytest.raises(RefusedError, match="1 bytes are missing"):
        with account.taking(object(), dataclasses.replace(plan, config=config)):
            raise AssertionError("there is no room")
    set_free(LEAST_BYTES + 20_000)
    with account.taking(object(), dataclasses.replace(plan, config=config)) as sized:
        assert sized.config.engine.options["num_pages"] == 1 + ROW_PAGES


def test_models_that_start_at_the_same_time_cannot_both_take_the_last_memory(
    engine: Engine, settings: Settings, set_free: SetFree, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_free(WHOLE_BYTES + LEAST_BYTES - 1)
    allocate = FakeEngine.make_arrays

    def slowly(self: FakeEngine) -> None:
        time.sleep(0.02)
        allocate(self)

    monkeypatch.setattr(FakeEngine, "make_arrays", slowly)
    names = ("a", "b", "c")
    for _ in range(2):
        together = threading.Barrier(len(names))
        statuses: dict[str, AsStatus] = {}

        def start(name: str, together: Any = together, found: Any = statuses) -> None:
            together.wait()
            assert engine.install_model(settings(name)) is SUCCESS
            found[name] = engine.start_model(name)

        threads = [threading.Thread(target=start, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = sorted(one.name for one in statuses.values())
        assert found == ["ALLSPARK_CACHE_MEMORY_OUT"] * 2 + ["ALLSPARK_SUCCESS"]
        for name in names:
            engine.stop_model(name)
            assert engine.release_model(name) is SUCCESS
        assert not engine._memory._taken


def test_what_a_failed_start_took_is_free_again(
    engine: Engine, settings: Settings, set_free: SetFree, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_free(WHOLE_BYTES)
    assert engine.install_model(settings()) is SUCCESS
    with monkeypatch.context() as patch:
        patch.setattr("tests.fake_engine.FakeEngine.warmup", fail)
        assert engine.start_model("one") is AsStatus.ALLSPARK_MEMORY_ERROR
    with monkeypatch.context() as patch:
        patch.setattr("tests.fake_engine.FakeEngine.make_arrays", fail)
        assert engine.start_model("one") is AsStatus.ALLSPARK_MEMORY_ERROR
    with monkeypatch.context() as patch:
        patch.setattr("tests.fake_engine.FakeEngine.step", fail)
        assert engine.start_model("one") is not SUCCESS
    assert engine._models["one"].loaded is None
    assert not engine._memory._taken
    assert engine.start_model("one") is SUCCESS, engine.last_error


def test_a_model_without_room_for_its_weights_has_a_wrong_parameter(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory plan is that of a real engine, of which nothing is loaded."""
    whole = memory.planned_memory(memory.with_pages(plan_model(settings()), 1 + 4 * ROW_PAGES))
    assert whole.weights_bytes > 2**20
    account = memory.ModelMemory()
    monkeypatch.setenv("BFC_MEM_RATIO", "1")
    for free, status in (
        (whole.weights_bytes - 1, AsStatus.ALLSPARK_PARAM_ERROR),
        (whole.total_bytes - whole.cache_bytes, AsStatus.ALLSPARK_CACHE_MEMORY_OUT),
    ):
        monkeypatch.setattr(memory, "free_bytes", lambda *_, free=free: free)
        with pytest.raises(RefusedError, match="are missing") as error:
            Loaded(plan_model(settings()), None, None, account)  # type: ignore[arg-type]
        assert error.value.status is status


# holds D06
def test_the_ratio_is_of_the_total_memory_of_a_device_and_of_the_free_memory_of_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = MemoryPlan(100, 50, 7, device_bytes=1000)
    gpu, cpu = FakeDevice(1000, in_use=0), FakeDevice(platform="cpu")
    monkeypatch.setattr(memory, "free_bytes", lambda one, _: (one.limit or 600) - one.in_use)

    def usable(device: Any, *others: MemoryPlan, mapped: int = 0) -> int:
        taken = [memory.TakenMemory(one, mapped) for one in others]
        return memory.usable_bytes(device, 1000, taken)

    assert (usable(gpu), usable(cpu)) == (900, 540)
    monkeypatch.setenv("BFC_MEM_RATIO", "0.5")
    assert (usable(gpu), usable(cpu)) == (500, 300)
    gpu.in_use = 150
    assert usable(gpu, other) == 500 - 157
    assert usable(cpu, other) == 375 - 157
    assert usable(cpu, other, mapped=100) == 325 - 157, "the system reports 100 bytes as free"
    tiers = memory.TakenMemory(other, host_bytes=30)
    assert memory.usable_bytes(cpu, 1000, [tiers]) == 375 - 157 - 30  # type: ignore[arg-type]
    gpu.in_use = 800
    assert usable(gpu, other) == 200 - 7, "another process has the rest"
    cpu.in_use = 540
    assert usable(cpu, other, mapped=0) == 105 - 157
    monkeypatch.setenv("BFC_MEM_RATIO", "1")
    assert usable(cpu, other, mapped=20) == 60 - 20 - 7
    monkeypatch.setenv("BFC_MEM_RATIO", "0.5")
    monkeypatch.setenv("BFC_LEFTOVER_MB", "0.0001")
    assert usable(gpu, other) == 200 - 7 - 104
    for name, wrong in (("BFC_MEM_RATIO", "0"), ("BFC_MEM_RATIO", "1.5"), ("BFC_LEFTOVER_MB", "x")):
        with monkeypatch.context() as patch:
            patch.setenv(name, wrong)
            with pytest.raises(ConfigError, match=name):
                usable(cpu)


def fail(*_: object) -> None:
    """Take the place of a method of a fake engine that runs out of memory."""
    raise MemoryError("no room")
