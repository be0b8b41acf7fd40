"""vInference.process_prompts_concurrently: order, limits, failures, streams, and a free
event loop.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from enginebay import SamplingParams
from enginebay_vinference import PromptOutput, vInference
from tests.unit.serving import DEADLOCK_S
from tests.unit.vinference.numpy_inference import HostFunctions
from tests.unit.vinference.small import TEXTS

pytestmark = pytest.mark.xdist_group("vinference")

GREEDY = SamplingParams(max_tokens=20)
CHAT = [{"role": "user", "content": "Hello!"}]

# holds V39


def together(
    inference: vInference, prompts: Any, limit: Any = 2, **options: Any
) -> list[PromptOutput]:
    return asyncio.run(inference.process_prompts_concurrently(prompts, limit, GREEDY, **options))


def assert_no_thread_is_left() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("vinference"):
            thread.join(DEADLOCK_S)
            assert not thread.is_alive()


def check_order(inference: vInference, limit: int) -> None:
    prompts = [*TEXTS, CHAT]
    calls: list[tuple[int, int]] = []
    outputs = together(
        inference, prompts, limit, progress_callback=lambda *done: calls.append(done)
    )
    assert [o.text for o in outputs] == [inference.process_prompt(p, GREEDY).text for p in prompts]
    assert calls == [(number, 5) for number in range(1, 6)]


@pytest.mark.parametrize("limit", [0, -3, 1, 2, 10])
def test_results_come_in_the_order_of_the_prompts(on_host: vInference, limit: int) -> None:
    check_order(on_host, limit)


@pytest.mark.long
def test_compiled_functions_give_results_in_the_order_of_the_prompts(inference: vInference) -> None:
    check_order(inference, 3)


@pytest.mark.parametrize(("limit", "most"), [(0, 1), (1, 1), (3, 3)])
def test_as_many_as_the_limit_run_at_once_and_no_more(
    on_host: vInference, functions: HostFunctions, limit: int, most: int
) -> None:
    lock, running, seen, waves = threading.Lock(), set[int](), list[int](), threading.Barrier(most)

    def count(kind: str) -> None:
        with lock:
            running.add(threading.get_ident())
            seen.append(len(running))
        if kind == "prefill":
            waves.wait(DEADLOCK_S)  # until as many prompts are under way as may be

    functions.before = count
    together(on_host, [TEXTS[0]] * 12, limit)
    assert max(seen) == most, "each thread of the pool runs one prompt at a time"


class Panic(BaseException):
    """What a panic in Rust code is raised as: no Exception."""


@pytest.mark.parametrize("kind", [Panic, SystemExit, KeyboardInterrupt])
def test_a_prompt_that_would_end_its_thread_fails_alone(
    on_host: vInference, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise kind("the tokenizer panicked")

    monkeypatch.setattr(on_host.tokenizer, "decode", fail)
    outputs = together(on_host, TEXTS[:3])
    assert {output.error for output in outputs} == {f"{kind.__name__}: the tokenizer panicked"}


def test_a_failing_prompt_fails_alone(on_host: vInference) -> None:
    outputs = together(on_host, [TEXTS[0], 7, "", TEXTS[1]])
    assert [o.error is None for o in outputs] == [True, False, False, True]
    assert "a prompt of type int" in str(outputs[1].error)
    assert (outputs[1].text, outputs[1].finish_reason) == (None, "error")


def test_a_prompt_that_fails_on_its_way_fails_alone(
    on_host: vInference, functions: HostFunctions
) -> None:
    calls: list[str] = []

    def fail_once(kind: str) -> None:
        calls.append(kind)
        if calls.count("decode") == 1 and kind == "decode":
            raise RuntimeError("device lost")

    functions.before = fail_once
    outputs = together(on_host, [TEXTS[0]] * 3, 1)
    assert [o.error for o in outputs] == ["RuntimeError: device lost", None, None]
    assert outputs[1].text == outputs[2].text


def check_stream(inference: vInference) -> None:
    prompts: list[Any] = [*TEXTS, 7]
    calls: list[tuple[int, int]] = []

    async def collect() -> list[tuple[int, str, Any]]:
        events = await inference.process_prompts_concurrently(
            prompts, 3, GREEDY, stream=True, progress_callback=lambda *done: calls.append(done)
        )
        return [event async for event in events]

    found: dict[int, list[tuple[str, Any]]] = {index: [] for index in range(len(prompts))}
    for index, kind, data in asyncio.run(collect()):
        found[index].append((kind, data))
    assert [kind for kind, _ in found.pop(4)] == ["error"]
    for index, events in found.items():
        *texts, (kind, final) = events
        assert [k for k, _ in texts] == ["text"] * len(texts)
        assert kind == "final"
        alone = inference.process_prompt(prompts[index], GREEDY).text
        assert "".join(data for _, data in texts) == final.text == alone
    assert calls == [(number, 5) for number in range(1, 6)]


def test_a_stream_gives_each_prompts_events_in_order_and_ends(on_host: vInference) -> None:
    check_stream(on_host)


def test_a_stream_of_compiled_functions_gives_each_prompts_events(inference: vInference) -> None:
    check_stream(inference)


def test_a_reader_that_stops_at_the_last_event_has_every_call(on_host: vInference) -> None:
    calls: list[tuple[int, int]] = []

    async def read() -> None:
        events = await on_host.process_prompts_concurrently(
            TEXTS[:2], 2, GREEDY, stream=True, progress_callback=lambda *done: calls.append(done)
        )
        ended = 0
        while ended < 2:
            ended += (await anext(events))[1] == "final"
        await events.aclose()

    asyncio.run(read())
    assert calls == [(1, 2), (2, 2)]


def test_cancelling_the_call_ends_what_is_under_way(
    on_host: vInference, functions: HostFunctions
) -> None:
    begun, go_on, calls = threading.Event(), threading.Event(), list[str]()

    def hold(kind: str) -> None:
        calls.append(kind)
        begun.set()
        go_on.wait(DEADLOCK_S)

    async def cancel() -> None:
        call = asyncio.ensure_future(
            on_host.process_prompts_concurrently([TEXTS[0]] * 50, 2, GREEDY)
        )
        while not begun.is_set():
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        go_on.set()

    functions.before = hold
    asyncio.run(cancel())
    assert_no_thread_is_left()
    assert 1 <= len(calls) <= 2, "two were under way, and ended after the call that they were in"


def test_leaving_a_stream_ends_what_is_under_way(
    on_host: vInference, functions: HostFunctions
) -> None:
    calls: list[str] = []
    left = threading.Event()

    def hold_later(kind: str) -> None:
        calls.append(kind)
        if calls.count("decode") == 2:  # by the first one there is some text
            left.wait(DEADLOCK_S)

    async def leave() -> None:
        events = await on_host.process_prompts_concurrently([TEXTS[0]] * 50, 1, GREEDY, stream=True)
        async for _ in events:
            break
        await events.aclose()
        left.set()

    functions.before = hold_later
    asyncio.run(leave())
    assert_no_thread_is_left()
    assert calls.count("prefill") == 1, "no other prompt begins"
    assert calls.count("decode") <= 2


def test_no_prompts_are_no_results(on_host: vInference) -> None:
    assert together(on_host, []) == []
    for arguments in (("text", 2), (list(TEXTS), "2"), (list(TEXTS), True)):
        with pytest.raises(ValueError, match="Allowed"):
            together(on_host, *arguments)
    with pytest.raises(ValueError, match="progress_callback"):
        together(on_host, [TEXTS[0]], progress_callback=3)


def test_without_parameters_the_configurations_hold(on_host: vInference) -> None:
    (output,) = asyncio.run(on_host.process_prompts_concurrently([TEXTS[0]], 1))
    assert output.text == on_host.process_prompt(TEXTS[0]).text


def test_the_event_loop_is_free_while_threads_generate(
    on_host: vInference, functions: HostFunctions
) -> None:
    """Other tasks run while a prompt is under way; the benchmark measures whether they are
    on time.
    """
    ticked, on_the_loop = threading.Event(), list[str]()

    async def count() -> int:
        task = asyncio.ensure_future(
            on_host.process_prompts_concurrently([TEXTS[0]] * 4, 0, GREEDY)
        )
        ticks = 0
        while not task.done():
            await asyncio.sleep(0)
            ticks += 1
            if ticks > 16:
                ticked.set()
        assert [output.error for output in task.result()] == [None] * 4
        return ticks

    def wait_for_ticks(kind: str) -> None:
        if threading.current_thread() is threading.main_thread():  # which the event loop runs on
            on_the_loop.append(kind)
        else:
            assert ticked.wait(DEADLOCK_S), "no other task ran"

    functions.before = wait_for_ticks
    assert asyncio.run(count()) > 16
    assert not on_the_loop, "between its steps the loop ran other tasks, and none during a step"
