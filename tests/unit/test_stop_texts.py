"""Stop texts end requests as tokens come, whoever reads what; a stream may be closed from any
thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from enginebay import LLM, SamplingParams
from enginebay.errors import RequestError
from enginebay.serving.observer import Ending
from enginebay_esurge import eSurge
from tests.brief import BRIEF
from tests.fakes import SIZES
from tests.unit.esurge.small import OPTIONS
from tests.unit.serving import DEADLOCK_S
from tests.unit.serving import Endings as Observed

Engine = LLM | eSurge

LONG, DOOMED = "Once upon a time", "The little fox"
ON = SamplingParams(max_tokens=100, ignore_eos=True)
STEPS: int = SIZES["decode_steps"]


class Endings(Observed):
    """Keeps what ended, and says when the first request has."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[Ending] = []
        self.one_has_ended = threading.Event()

    def ended(self, ending: Ending) -> None:
        self.all.append(ending)
        self.one_has_ended.set()


@pytest.fixture(params=["LLM", "eSurge"])
def engine(request: pytest.FixtureRequest, faked: None) -> Iterator[Engine]:
    made: Engine = (
        LLM(BRIEF, processors=(), **SIZES) if request.param == "LLM" else eSurge(BRIEF, **OPTIONS)
    )
    with made:
        yield made
        assert made.run_on_engine(lambda: made.engine.rows.num_reqs) == 0


@contextlib.contextmanager
def watched(engine: Engine) -> Iterator[Endings]:
    """An observer that sees what ends within the block."""
    endings, observers = (
        Endings(),
        engine.loop.observers if isinstance(engine, LLM) else engine.audience,
    )
    observers.add(endings)
    yield endings
    observers.remove(endings)


def stop_in_middle(
    engine: Engine, prompt: str, params: SamplingParams, index: int = 0
) -> tuple[str, int]:
    """A text that first comes in the middle of a completion, and the tokens after which it is
    there.
    """
    whole = engine.generate(prompt, params.model_copy(update={"n": max(params.n, index + 1)}))[
        0
    ].outputs[index]
    for end in range(20, len(whole.token_ids)):
        text = engine_text(engine, whole.token_ids[:end])
        stop = text[-4:]
        if "\ufffd" not in stop and len(stop) == 4 and whole.text.find(stop) == len(text) - 4:
            return stop, end
    raise AssertionError("no text that comes once")


def engine_text(engine: Engine, token_ids: list[int]) -> str:
    tokenizer = engine.tokenizer if isinstance(engine, LLM) else engine._jobs.tokenizer
    return tokenizer.decode(token_ids)


def finished(output: Any, index: int = 0) -> tuple[str, int]:
    one = output.outputs[index]
    return one.finish_reason, len(one.token_ids)


def assert_few_past(endings: Endings, num_tokens: int, count: int = 1) -> None:
    """Of the requests that ended by a stop text, none computed many tokens past it."""
    stopped = [e.metrics.num_generated_tokens for e in endings.all if e.reason == "abort"]
    assert len(stopped) == count
    assert all(num_tokens <= computed <= num_tokens + 2 * STEPS for computed in stopped), stopped


def test_a_stop_text_ends_a_prompt_while_another_is_waited_for(engine: Engine) -> None:
    stop, num_tokens = stop_in_middle(engine, DOOMED, ON)
    params = ON.model_copy(update={"stop": (stop,)})
    with watched(engine) as endings:
        long, ended = engine.generate([LONG, DOOMED], params)
    assert finished(long) == ("length", 100)
    assert finished(ended) == ("stop", num_tokens)
    assert ended.num_generated_tokens == num_tokens
    assert_few_past(endings, num_tokens)


def test_a_stop_text_ends_one_of_several_completions(engine: Engine) -> None:
    params = ON.model_copy(update={"n": 3, "temperature": 0.9, "seed": 5})
    stop, num_tokens = stop_in_middle(engine, DOOMED, params, index=2)
    with watched(engine) as endings:
        [output] = engine.generate(DOOMED, params.model_copy(update={"stop": (stop,)}))
    assert [finished(output, i) for i in range(3)] == [
        ("length", 100),
        ("length", 100),
        ("stop", num_tokens),
    ]
    assert_few_past(endings, num_tokens)


def test_a_stop_text_ends_a_stream_that_is_not_read(engine: Engine) -> None:
    stop, num_tokens = stop_in_middle(engine, DOOMED, ON)
    with watched(engine) as endings:
        stream = engine.stream(DOOMED, ON.model_copy(update={"stop": (stop,)}))
        first = next(stream)  # it may hold every token, if the reader comes late
        assert endings.one_has_ended.wait(DEADLOCK_S)
    assert_few_past(endings, num_tokens)
    *_, last = first, *stream
    assert (
        last.finish_reason if isinstance(engine, LLM) else last.outputs[0].finish_reason
    ) == "stop"


def test_a_stop_text_ends_an_async_stream_whose_reader_is_busy(faked: None) -> None:
    with LLM(BRIEF, processors=(), **SIZES) as llm, watched(llm) as endings:
        stop, num_tokens = stop_in_middle(llm, DOOMED, ON)
        endings.all.clear()
        endings.one_has_ended.clear()

        async def read() -> list[Any]:
            stream = llm.astream(DOOMED, ON.model_copy(update={"stop": (stop,)}))
            first = await anext(stream)
            assert endings.one_has_ended.wait(
                DEADLOCK_S
            )  # the event loop does nothing else meanwhile
            return [first, *[chunk async for chunk in stream]]

        chunks = asyncio.run(read())
        assert_few_past(endings, num_tokens)
        assert (chunks[-1].finish_reason, sum(len(c.delta_token_ids) for c in chunks)) == (
            "stop",
            num_tokens,
        )


class Gate:
    """A step hook that holds every step until it is opened."""

    def __init__(self, engine: Engine) -> None:
        self.is_held, self._open = threading.Event(), threading.Event()
        engine.engine.before_step = self._hold

    def _hold(self, plan: Any) -> None:
        self.is_held.set()
        assert self._open.wait(DEADLOCK_S)

    def open(self) -> None:
        """Let all steps run."""
        self._open.set()


def in_thread(function: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """A thread that runs a function, and what that returned or raised."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(function())
        except Exception as error:  # noqa: BLE001  # what the test looks at
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


def test_an_error_in_the_last_prompt_surfaces_at_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(engine)
    monkeypatch.setattr(type(engine.engine.ledger), "max_tokens", 50)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    thread, found = in_thread(
        lambda: engine.generate(["A", "A", "A long prompt: " + "fox " * 40], params)
    )
    thread.join(DEADLOCK_S)  # no step has run
    assert isinstance(found[0], RequestError)
    gate.open()


class SlowQueue:
    """A queue whose writer is held up after each message, as on a busy machine: the reader has
    taken it and gone on.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def put(self, message: Any) -> None:
        self._inner.put(message)
        time.sleep(0.2)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_an_error_in_the_last_prompt_surfaces_at_once_on_a_busy_machine(
    faked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(BRIEF, processors=(), **SIZES) as llm:
        gate = Gate(llm)
        monkeypatch.setattr(type(llm.engine.ledger), "max_tokens", 50)
        inbox = llm.loop._inbox
        inbox._messages = SlowQueue(inbox._messages)  # type: ignore[assignment]
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        thread, found = in_thread(
            lambda: llm.generate(["A", "A", "A long prompt: " + "fox " * 40], params)
        )
        thread.join(10)
        waits, early = thread.is_alive(), list(found)  # no step has run
        gate.open()
        assert not waits
        assert isinstance(early[0], RequestError)


def test_a_stream_is_closed_while_another_thread_waits_for_it(engine: Engine) -> None:
    gate = Gate(engine)
    with watched(engine) as endings:
        stream = engine.stream(LONG, ON)
        thread, found = in_thread(lambda: list(stream))
        assert gate.is_held.wait(DEADLOCK_S)
        stream.close()
        thread.join(DEADLOCK_S)  # no step has run
        assert found == [[]]
        gate.open()
        assert endings.one_has_ended.wait(DEADLOCK_S)
    assert [ending.reason for ending in endings.all] == ["abort"]
    assert endings.all[0].metrics.num_generated_tokens <= 1 + STEPS
    assert next(stream, None) is None
    stream.close()


def test_an_async_stream_is_closed_while_another_task_waits_for_it(faked: None) -> None:
    with LLM(BRIEF, processors=(), **SIZES) as llm, watched(llm) as endings:
        gate = Gate(llm)

        async def close_early() -> list[Any]:
            stream = llm.astream(LONG, ON)

            async def read() -> list[Any]:
                return [chunk async for chunk in stream]

            reading = asyncio.create_task(read())
            assert await asyncio.to_thread(gate.is_held.wait, DEADLOCK_S)
            await stream.aclose()
            return await reading

        assert asyncio.run(close_early()) == []
        gate.open()
        assert endings.one_has_ended.wait(DEADLOCK_S)
        assert [ending.reason for ending in endings.all] == ["abort"]
