"""What requests may do with adapters at run time, on the fake engine."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from enginebay import LLM, SamplingParams
from enginebay.contracts.adapters import AdapterCountError, AdapterInUseError, AdapterNotFoundError
from enginebay.errors import RequestError
from enginebay_lora.peft import read_adapter
from tests.adapters import write_adapter
from tests.brief import BRIEF
from tests.fake_engine import FakeEngine
from tests.unit.serving import DEADLOCK_S

GREEDY = SamplingParams(max_tokens=3, ignore_eos=True)


@pytest.fixture
def llm(faked: None, tmp_path: Path) -> Iterator[LLM]:
    """BRIEF with one slot and the adapter a."""
    adapter = write_adapter(tmp_path / "a", BRIEF, targets=["q_proj"])
    fields: Any = {"lora": {"a": str(adapter)}, "max_model_len": 64, "processors": ()}
    with LLM(BRIEF, **fields) as made:
        yield made


def test_adapters_are_loaded_and_unloaded_at_run_time(llm: LLM, tmp_path: Path) -> None:
    engine = llm.engine
    assert isinstance(engine, FakeEngine)
    llm.load_adapter("b", write_adapter(tmp_path / "b", BRIEF, targets=["q_proj"]))
    outputs = llm.generate(["A", "B", "C", "D"], GREEDY, lora=["a", "b", None, "b"])
    assert [len(one.outputs[0].token_ids) for one in outputs] == [3] * 4
    assert engine.written_slots == [0, 0], "both rows of b run after a has ended"
    assert not engine.rows.adapters.any()
    llm.unload_adapter("b")
    with pytest.raises(RequestError, match="adapter 'b'"):
        llm.generate("A", GREEDY, lora="b")
    with pytest.raises(AdapterNotFoundError, match="adapter 'b'"):
        llm.unload_adapter("b")


def test_an_adapter_in_use_cannot_be_unloaded(llm: LLM) -> None:
    engine = llm.engine
    assert isinstance(engine, FakeEngine)
    refused: list[str] = []

    def unload(_: Any) -> None:
        with pytest.raises(AdapterInUseError, match="which unfinished requests use") as error:
            llm.unload_adapter("a")
        refused.append(str(error.value))

    engine.before_read = unload
    llm.generate("A", GREEDY, lora="a")
    assert refused
    engine.before_read = lambda _: None
    llm.unload_adapter("a")


def test_an_engine_without_slots_says_so(fake_llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(AdapterCountError, match="lora = 'a' with an engine without slots"):
        fake_llm.generate("A", GREEDY, lora="a")
    with pytest.raises(RequestError, match=re.escape("load_adapter('a') with an engine without")):
        fake_llm.load_adapter("a", tmp_path)
    with pytest.raises(RequestError, match=re.escape("unload_adapter('a') with an engine")):
        fake_llm.unload_adapter("a")


def test_requests_go_on_while_an_adapter_is_read(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_reading, may_end = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> Any:
        is_reading.set()
        assert may_end.wait(DEADLOCK_S)
        return read_adapter(*arguments)

    monkeypatch.setattr("enginebay_lora.store.read_adapter", slow)
    folder = write_adapter(tmp_path / "b", BRIEF, targets=["q_proj"])
    loading = threading.Thread(target=llm.load_adapter, args=("b", folder))
    loading.start()
    try:
        assert is_reading.wait(DEADLOCK_S)
        [output] = llm.generate("A", GREEDY, lora="a")
        assert len(output.outputs[0].token_ids) == 3
        with pytest.raises(AdapterNotFoundError, match="adapter 'b'"):
            llm.generate("A", GREEDY, lora="b")
        assert loading.is_alive()
    finally:
        may_end.set()
        loading.join(DEADLOCK_S)
    [output] = llm.generate("A", GREEDY, lora="b")
    assert len(output.outputs[0].token_ids) == 3


MESSAGES = [{"role": "user", "content": "A"}]
APIS: dict[str, Callable[[LLM, str], object]] = {
    "generate": lambda llm, name: llm.generate("A", GREEDY, lora=name),
    "stream": lambda llm, name: list(llm.stream("A", GREEDY, lora=name)),
    "chat": lambda llm, name: llm.chat(MESSAGES, GREEDY, lora=name),
    "chat_stream": lambda llm, name: list(llm.chat_stream(MESSAGES, GREEDY, lora=name)),
    "embed": lambda llm, name: llm.embed("A", lora=name),
    "agenerate": lambda llm, name: asyncio.run(llm.agenerate("A", GREEDY, lora=name)),
    "achat": lambda llm, name: asyncio.run(llm.achat(MESSAGES, GREEDY, lora=name)),
    "aembed": lambda llm, name: asyncio.run(llm.aembed("A", lora=name)),
    "astream": lambda llm, name: asyncio.run(first_of(llm.astream("A", GREEDY, lora=name))),
}


async def first_of(chunks: AsyncIterator[Any]) -> Any:
    return await anext(chunks)


@pytest.mark.parametrize("api", APIS)
def test_every_api_passes_the_name_on(llm: LLM, api: str) -> None:
    with pytest.raises(AdapterNotFoundError, match=r"adapter 'other'.*the loaded adapters: 'a'"):
        APIS[api](llm, "other")


def test_a_configuration_file_names_adapters(faked: None, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "a", BRIEF, targets=["q_proj"])
    path = tmp_path / "engine.toml"
    path.write_text(f'model = "{BRIEF}"\nmax_model_len = 64\n\n[lora]\ntales = "{adapter}"\n')
    with LLM.from_config(path) as llm:
        assert isinstance(llm.engine, FakeEngine)
        llm.generate("A", GREEDY, lora="tales")
        assert llm.engine.written_slots == [0]
