"""Requests one by one and by id: submit, abort, counts, and events of many with one wake-up."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from enginebay import LLM, AsyncEvents, Events, SamplingParams
from enginebay.errors import InternalError, RequestError, StoppedError
from enginebay.outputs import StreamChunk
from enginebay.serving.events import Event, RequestEnded
from enginebay.serving.requests import Counts
from tests.brief import BRIEF
from tests.fakes import SIZES
from tests.unit.loops import FailsOnce, Pauses, go_on, held, seeing
from tests.unit.serving import DEADLOCK_S, forbid_requests

LONG = SamplingParams(max_tokens=100, ignore_eos=True)
SHORT = SamplingParams(max_tokens=10, ignore_eos=True, logprobs=None)
THREE = SamplingParams(max_tokens=10, n=3, temperature=1.0, seed=5, ignore_eos=True)
PROMPTS = ["Once upon a time", "The little fox", "A", "One day"]


@pytest.fixture
def llm(faked: None) -> Iterator[LLM]:
    with LLM(BRIEF, processors=(), **SIZES) as made:
        yield made
        made.run_on_engine(made.engine.ledger.check)
        assert made.run_on_engine(lambda: made.engine.rows.num_reqs) == 0


def text_of(events: Sequence[Event], request_id: str, index: int = 0) -> str:
    return "".join(
        event.delta_text
        for event in events
        if isinstance(event, StreamChunk) and (event.request_id, event.index) == (request_id, index)
    )


def ends(events: Sequence[Event]) -> dict[str, RequestEnded]:
    found = [event for event in events if isinstance(event, RequestEnded)]
    assert len({event.request_id for event in found}) == len(found), "each request ends once"
    return {event.request_id: event for event in found}


def finish_reasons(end: RequestEnded) -> list[str | None]:
    assert end.output is not None
    return [one.finish_reason for one in end.output.outputs]


class Waked:
    """Counts how often a queue or an event loop is asked to wake its readers."""

    def __init__(self, function: Any) -> None:
        self.function, self.times = function, 0

    def __call__(self, *args: Any) -> Any:
        self.times += 1
        return self.function(*args)


class Steps:
    """A step hook that counts the steps that were read."""

    def __init__(self) -> None:
        self.num = 0

    def __call__(self, plan: Any) -> None:
        self.num += 1


def test_events_of_several_requests_come_in_order_and_end_with_the_output(llm: LLM) -> None:
    whole = llm.generate(PROMPTS[:2], [SHORT, THREE])
    events = Events()
    one = llm.submit(PROMPTS[0], SHORT, events=events, request_id="one")
    three = llm.submit(PROMPTS[1], THREE, events=events, request_id="three")
    assert (one.request_id, one.num_completions, three.num_completions) == ("one", 1, 3)
    assert list(one.prompt_token_ids) == whole[0].prompt_token_ids
    found = list(events)
    assert found[-1] in ends(found).values()
    for name, expected in zip(("one", "three"), whole, strict=True):
        output = ends(found)[name].output
        assert output is not None
        assert output.outputs == expected.outputs
        assert output.num_generated_tokens == expected.num_generated_tokens
        for completion in expected.outputs:
            assert text_of(found, name, completion.index) == completion.text
    chunks = [event for event in found if isinstance(event, StreamChunk)]
    lasts = [(event.request_id, event.index) for event in chunks if event.finish_reason]
    assert sorted(lasts) == [("one", 0), ("three", 0), ("three", 1), ("three", 2)]


def test_without_a_stream_the_end_is_the_only_event(llm: LLM) -> None:
    events = Events()
    best = SamplingParams(max_tokens=5, n=2, ignore_eos=True, temperature=1.0)
    handle = llm.submit(PROMPTS[0], best, events=events, stream=False)
    [end] = list(events)
    assert isinstance(end, RequestEnded)
    assert (end.request_id, finish_reasons(end)) == (handle.request_id, ["length", "length"])


def test_a_step_of_many_requests_wakes_a_reader_once(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    events, steps = Events(), Steps()
    waked = Waked(events._wake)
    monkeypatch.setattr(events, "_wake", waked)
    with held(llm.loop), seeing(llm.engine, read=steps):
        for prompt in PROMPTS:
            llm.submit(prompt, SHORT, events=events)
        go_on(llm.loop)
        assert len(ends(list(events))) == 4
    assert 0 < waked.times <= steps.num


def test_all_readers_of_an_event_loop_are_woken_with_one_callback(llm: LLM) -> None:
    steps = Steps()

    async def read(events: AsyncEvents) -> list[Event]:
        return [event async for event in events]

    async def run() -> tuple[list[list[Event]], int]:
        loop = asyncio.get_running_loop()
        readers = [AsyncEvents() for _ in PROMPTS]
        waked = Waked(loop.call_soon_threadsafe)
        go_on(llm.loop, paused=True)
        for events, prompt in zip(readers, PROMPTS, strict=True):
            await llm.asubmit(prompt, SHORT, events=events)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "call_soon_threadsafe", waked)
            go_on(llm.loop)
            found = await asyncio.gather(*map(read, readers))
        return found, waked.times

    with seeing(llm.engine, read=steps):
        found, times = asyncio.run(run())
    assert [len(ends(events)) for events in found] == [1, 1, 1, 1]
    assert 0 < times <= steps.num


def test_streams_of_an_event_loop_share_its_wake_ups(llm: LLM) -> None:
    async def read(prompt: str) -> str:
        return "".join([chunk.delta_text async for chunk in llm.astream(prompt, SHORT)])

    async def run() -> list[str]:
        return list(await asyncio.gather(*map(read, PROMPTS)))

    assert asyncio.run(run()) == [one.get_text() for one in llm.generate(PROMPTS, SHORT)]


def test_a_slow_reader_gets_the_unread_chunks_of_a_completion_as_one(llm: LLM) -> None:
    events = Events()
    llm.submit(PROMPTS[0], THREE, events=events, request_id="slow")
    expected = llm.generate(PROMPTS[0], THREE)[0].outputs
    while llm.counts() != Counts(0, 0):
        time.sleep(0.001)
    found = events.get()
    assert len(found) == 4
    for one in found[:3]:
        assert isinstance(one, StreamChunk)
        assert one.delta_text == expected[one.index].text
        assert list(one.delta_token_ids) == expected[one.index].token_ids
        assert one.finish_reason == "length"
        assert one.metrics is not None
    assert isinstance(found[3], RequestEnded)
    assert events.get(timeout_s=0) == []


def test_an_id_counts_and_is_refused_to_others_until_its_end(llm: LLM) -> None:
    events = Events()
    with held(llm.loop):
        for name in "abcdef":
            llm.submit("A", SHORT, events=events, request_id=name)
        assert llm.counts() == Counts(waiting=6, running=0)
        with pytest.raises(
            RequestError,
            match=r"request id 'c', which an unfinished request has\. Allowed: the id of no",
        ):
            llm.submit("A", SHORT, events=events, request_id="c")
        assert llm.counts() == Counts(waiting=6, running=0)
    assert sorted(ends(list(events))) == list("abcdef")
    assert llm.counts() == Counts(0, 0)
    llm.submit("A", SHORT, events=events, request_id="c")
    assert list(ends(list(events))) == ["c"]


def test_running_requests_are_counted_once_whatever_their_completions(llm: LLM) -> None:
    events, pauses = Events(), Pauses(llm.loop, after=3)
    with seeing(llm.engine, launch=pauses):
        llm.submit("A", THREE.model_copy(update={"max_tokens": 100}), events=events)
        pauses.wait()
        assert llm.counts() == Counts(waiting=0, running=1)
        llm.submit("A", SHORT, events=events)
        assert llm.counts() == Counts(waiting=1, running=1)
    events.close()
    assert llm.counts() == Counts(0, 0)
    go_on(llm.loop)


@pytest.mark.parametrize("request_id", ["", 7, b"x"])
def test_what_is_no_id_is_refused(
    llm: LLM, request_id: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        forbid_requests(llm, patch)
        with pytest.raises(RequestError, match="Allowed: text that is not empty"):
            llm.submit("A", SHORT, events=Events(), request_id=request_id)
    assert llm.counts() == Counts(0, 0)


def test_an_aborted_request_ends_with_what_there_is_and_frees_its_rows(llm: LLM) -> None:
    events, pauses = Events(), Pauses(llm.loop, after=4)
    many = THREE.model_copy(update={"max_tokens": 100})
    with seeing(llm.engine, launch=pauses):
        llm.submit(PROMPTS[0], many, events=events, request_id="gone")
        llm.submit(PROMPTS[1], SHORT, events=events, request_id="stays")
        pauses.wait()
        assert llm.abort("gone")
        go_on(llm.loop)
        found = list(events)
    assert not llm.abort("gone")
    assert not llm.abort("never")
    gone = ends(found)["gone"]
    assert finish_reasons(gone) == ["abort"] * 3
    assert gone.output is not None
    for one in gone.output.outputs:
        assert text_of(found, "gone", one.index) == one.text
    assert finish_reasons(ends(found)["stays"]) == ["length"]


def test_a_waiting_request_is_aborted_before_it_runs(llm: LLM) -> None:
    events = Events()
    with held(llm.loop):
        llm.submit("A", LONG, events=events, request_id="waits")
        assert llm.abort("waits")
        [chunk, end] = list(events)  # while nothing runs
    assert isinstance(chunk, StreamChunk)
    assert (chunk.finish_reason, chunk.delta_token_ids) == ("abort", ())
    assert isinstance(end, RequestEnded)
    assert finish_reasons(end) == ["abort"]


def test_an_error_ends_the_request_with_all_completions_once(llm: LLM) -> None:
    events = Events()
    with seeing(llm.engine, launch=FailsOnce()):
        llm.submit(PROMPTS[0], THREE, events=events, request_id="fails")
        end = ends(list(events))["fails"]
    assert isinstance(end.error, InternalError)
    assert end.output is None
    llm.submit(PROMPTS[0], SHORT, events=events, request_id="fails")
    assert finish_reasons(ends(list(events))["fails"]) == ["length"], "the service goes on"


def test_closing_the_engine_ends_every_request_with_an_error(faked: None) -> None:
    llm, events = LLM(BRIEF, processors=(), **SIZES), Events()
    go_on(llm.loop, paused=True)
    for name in "ab":
        llm.submit("A", LONG, events=events, request_id=name)
    closing = threading.Thread(target=llm.close)
    closing.start()
    found = ends(list(events))
    closing.join(DEADLOCK_S)
    assert sorted(found) == ["a", "b"]
    assert all(isinstance(end.error, StoppedError) for end in found.values())
    with pytest.raises(StoppedError, match="the engine was closed"):
        llm.submit("A", LONG, events=events, request_id="c")
    assert llm.counts() == Counts(0, 0)
    assert list(events) == [], "nothing waits for the refused one"


def test_an_engine_that_breaks_down_ends_every_request_with_an_error(
    faked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise MemoryError("no arrays")

    events = Events()
    with LLM(BRIEF, processors=(), **SIZES) as llm:
        go_on(llm.loop, paused=True)
        monkeypatch.setattr(llm.engine, "make_arrays", broken)
        with seeing(llm.engine, launch=FailsOnce(lambda _: True)):
            for name in "abcdef":  # more than there are rows
                llm.submit("A", LONG, events=events, request_id=name)
            go_on(llm.loop)
            found = ends(list(events))
        assert sorted(found) == list("abcdef")
        assert all(isinstance(end.error, InternalError) for end in found.values())
        with pytest.raises(StoppedError, match="the engine broke down"):
            llm.submit("A", LONG, events=events)
        assert llm.counts() == Counts(0, 0)


def test_letting_go_of_events_ends_their_requests(llm: LLM) -> None:
    events = Events()
    with held(llm.loop):
        llm.submit("A", LONG, events=events, request_id="a")
        del events
        gc.collect()
        assert llm.counts() == Counts(0, 0)
        again = Events()
        llm.submit("A", SHORT, events=again, request_id="a")  # the id is free
    assert finish_reasons(ends(list(again))["a"]) == ["length"]


def test_closed_events_give_nothing_and_refuse_requests(llm: LLM) -> None:
    events = Events()
    found: list[Any] = []
    go_on(llm.loop, paused=True)
    llm.submit("A", LONG, events=events)
    threads = [threading.Thread(target=lambda: found.append(events.get())) for _ in range(3)]
    for thread in threads:
        thread.start()
    events.close()
    for thread in threads:
        thread.join(DEADLOCK_S)
    assert found == [[], [], []]
    go_on(llm.loop)
    with pytest.raises(RequestError, match="a request with closed events"):
        llm.submit("A", SHORT, events=events)
    assert llm.counts() == Counts(0, 0)


def test_closed_async_events_wake_who_waits(llm: LLM) -> None:
    async def run() -> list[Event]:
        events = AsyncEvents()
        go_on(llm.loop, paused=True)
        await llm.asubmit("A", LONG, events=events)
        waits = asyncio.create_task(events.get())
        await asyncio.sleep(0)
        await asyncio.to_thread(events.close)
        return await asyncio.wait_for(waits, DEADLOCK_S)

    assert asyncio.run(run()) == []
    go_on(llm.loop)


def test_a_cancelled_submission_queues_nothing(llm: LLM) -> None:
    entered, leave = threading.Event(), threading.Event()
    encode = llm.tokenizer.encode

    def slow(*args: Any, **options: Any) -> list[int]:
        entered.set()
        leave.wait(DEADLOCK_S)
        return encode(*args, **options)

    async def run(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(llm.tokenizer, "encode", slow)
        task = asyncio.create_task(llm.asubmit("A", LONG, events=AsyncEvents()))
        await asyncio.to_thread(entered.wait, DEADLOCK_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        leave.set()

    with pytest.MonkeyPatch.context() as patch:
        asyncio.run(run(patch))
    assert llm.counts() == Counts(0, 0)


def test_requests_of_streams_and_generate_are_counted_too(llm: LLM) -> None:
    with held(llm.loop):
        stream = llm.stream("A", LONG)
        assert llm.counts() == Counts(waiting=1, running=0)
        stream.close()
        assert llm.counts() == Counts(0, 0)
