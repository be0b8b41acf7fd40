"""eSurge's requests choose adapters by name, which are loaded and unloaded while it serves."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from enginebay.contracts.adapters import AdapterCountError, AdapterInUseError, AdapterNotFoundError
from enginebay_esurge import eSurge
from tests.adapters import write_adapter
from tests.brief import BRIEF
from tests.unit.esurge.conftest import Make
from tests.unit.esurge.small import GREEDY, PROMPTS

pytestmark = pytest.mark.xdist_group("esurge")


def test_requests_choose_adapters_by_name(make_faked: Make, tmp_path: Path) -> None:
    first, second = (
        write_adapter(tmp_path / name, BRIEF, seed=seed, targets=["q_proj"])
        for seed, name in enumerate("ab")
    )
    with make_faked(lora={"a": str(first)}, processors=()) as engine:
        engine.load_adapter("b", second)
        outputs = engine.generate(PROMPTS[:3], GREEDY, lora=["a", None, "b"])
        assert [bool(one.outputs[0].token_ids) for one in outputs] == [True] * 3
        assert engine.engine.written_slots == [0, 0], "one slot, in turn"
        engine.engine.before_step = lambda _: time.sleep(0.01)
        stream = engine.stream(PROMPTS[0], GREEDY, lora="b")
        with pytest.raises(AdapterInUseError):
            engine.unload_adapter("b")
        list(stream)
        engine.unload_adapter("b")
        with pytest.raises(AdapterNotFoundError, match="Allowed: the loaded adapters: 'a'"):
            engine.generate(PROMPTS[:1], GREEDY, lora="b")
    engine.unload_adapter("a")  # stopped


def test_an_engine_without_slots_says_so(engine: eSurge, tmp_path: Path) -> None:
    for call in (
        lambda: engine.load_adapter("a", tmp_path),
        lambda: engine.unload_adapter("a"),
        lambda: engine.generate(PROMPTS[:1], GREEDY, lora="a"),
    ):
        with pytest.raises(AdapterCountError, match="an engine without slots"):
            call()
