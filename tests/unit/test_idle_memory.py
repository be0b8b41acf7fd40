"""Memory that an engine gives back while no request is there."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from enginebay import LLM, SamplingParams
from enginebay.contracts.engine import Engine
from enginebay.errors import ConfigError
from enginebay_paged.ledger import PageLedger
from enginebay_xla.platforms import CpuPlatform
from tests.brief import BRIEF
from tests.unit.serving import SIZES

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
PROMPTS = [list(range(4, 60)), list(range(9, 80)), list(range(30, 50))]


def written(llm: LLM) -> dict[str, set[int]]:
    """The pages of each group in which any array has a value that is not 0."""
    cache = llm.engine.executor.arrays().cache
    return {
        group: {
            int(page)
            for layer in layers
            for array in layer.values()
            for page in np.flatnonzero(np.asarray(array).reshape(len(array), -1).any(axis=1))
        }
        for group, layers in cache.items()
    }


def tokens(llm: LLM) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(PROMPTS, GREEDY)]


def release(llm: LLM) -> float | None:
    return llm.run_on_engine(llm.engine.release_memory)


@pytest.mark.long
def test_pages_that_nothing_uses_become_zeros_and_prefixes_stay(llm: LLM) -> None:
    expected, ledger = tokens(llm), llm.engine.ledger
    assert isinstance(ledger, PageLedger)
    due_s = release(llm)
    kept = {name: set(np.flatnonzero(n == -1)) for name, n in ledger.page_holders().items()}
    assert all(kept.values())
    for group, pages in written(llm).items():
        assert pages - {0} <= kept[group]
    assert due_s is not None
    assert 200 < due_s <= 300
    assert tokens(llm) == expected
    ledger.check()


def test_prefixes_leave_when_they_have_rested_and_the_engine_is_idle(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, ledger = tokens(llm), llm.engine.ledger
    assert isinstance(ledger, PageLedger)
    for group in ledger.groups.values():
        monkeypatch.setattr(group.store, "_clock", lambda: time.monotonic() + 1000)
    assert release(llm) is None
    assert not any(pages - {0} for pages in written(llm).values())
    assert not any((n == -1).any() for n in ledger.page_holders().values())
    monkeypatch.undo()
    assert tokens(llm) == expected
    ledger.check()


@pytest.mark.long
def test_slots_without_a_row_become_zeros() -> None:
    with LLM(BRIEF, engine="vinference", **SIZES) as llm:
        expected = tokens(llm)
        assert any(written(llm).values())
        assert release(llm) is None
        assert not any(written(llm).values())
        assert tokens(llm) == expected


@pytest.mark.parametrize("option", [{"prefix_idle_s": 7.0}, {"prefix_caching": False}])
def test_the_limit_is_an_option(option: dict[str, object]) -> None:
    with LLM(BRIEF, engine={"name": "oengine", **option}, idle_release_s=60, **SIZES) as llm:
        ledger = llm.engine.ledger
        assert isinstance(ledger, PageLedger)
        indexes = [group.store.index for group in ledger.groups.values()]
        assert [None if one is None else one.idle_s for one in indexes] == [
            option.get("prefix_idle_s")
        ] * len(indexes)


def test_a_limit_that_nothing_would_keep_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = {"name": "oengine", "prefix_idle_s": 7.0}
    with pytest.raises(ConfigError, match=r"prefix_idle_s = 7, without idle_release_s"):
        LLM(BRIEF, engine=engine, **SIZES)
    monkeypatch.setattr(CpuPlatform, "demand_memory", False)
    with pytest.raises(ConfigError, match="Set idle_release_s too, or set prefix_ttl_s"):
        LLM(BRIEF, engine=engine, idle_release_s=60, **SIZES)


def test_the_loop_releases_memory_some_time_after_the_last_request(
    fake_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, called = list[float](), threading.Event()

    def release_memory(engine: Engine) -> float | None:
        calls.append(time.monotonic())
        if len(calls) == 2:
            called.set()
        return 0.05 if len(calls) == 1 else None

    monkeypatch.setattr(fake_llm.loop._idle, "after_s", 0.2)
    monkeypatch.setattr(type(fake_llm.engine), "release_memory", release_memory)
    fake_llm.generate(PROMPTS, GREEDY)
    ended_s = time.monotonic()
    assert called.wait(10)
    assert calls[0] - ended_s > 0.1
    assert calls[1] - calls[0] > 0.04
    time.sleep(0.4)
    assert len(calls) == 2, "nothing more is due before the next request"
