"""Whatever a part raises on the engine's threads, those who wait are answered, and the service goes
on or says why not.
"""

from __future__ import annotations

import asyncio
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from enginebay import LLM, SamplingParams
from enginebay.compose.composition import Composed
from enginebay.contracts.engine import StepPlan
from enginebay.contracts.scheduler import Decision, Scheduler, SchedulerView
from enginebay.errors import EnginebayError, InternalError, RequestError, StoppedError
from enginebay.serving.loop import EngineLoop
from enginebay.serving.messages import LoopCall
from enginebay.serving.observer import Ending
from enginebay.serving.running import Running
from tests.brief import BRIEF
from tests.fakes import SIZES, compose_fake, expected_tokens
from tests.unit.loops import Loops, events, request, running, seeing, tokens
from tests.unit.serving import DEADLOCK_S, Endings


class Panic(BaseException):
    """What a panic in Rust code is raised as: no Exception."""


class Wordless(Exception):
    """Its message cannot be read."""

    def __str__(self) -> str:
        raise SystemExit(3)


ENDS: list[type[BaseException]] = [SystemExit, KeyboardInterrupt, Panic]
EVERYTHING: list[type[BaseException]] = [*ENDS, Wordless]


@pytest.fixture(scope="module")
def composed() -> Composed:
    return compose_fake("oengine", {"page_size": 8, "num_pages": 25})


@pytest.fixture
def parts(composed: Composed) -> Composed:
    composed.engine.drop_arrays()
    composed.engine.make_arrays()
    return composed


@pytest.fixture
def start(parts: Composed) -> Iterator[Loops]:
    yield from running(parts)


@pytest.fixture
def loop(start: Loops) -> EngineLoop:
    return start()


@pytest.fixture
def llm(faked: None) -> Iterator[LLM]:
    with LLM(BRIEF, processors=(), **SIZES) as made:
        yield made


def error_of(ticket: Running) -> EnginebayError | None:
    return events(ticket)[-1].error


def serves(loop: EngineLoop, name: str = "after") -> bool:
    """Whether a request gets its tokens."""
    return tokens(loop.submit([request(name)])[0]) == expected_tokens(request(name))


def answer(call: Callable[[], Any]) -> Any:
    """What a call returns or raises on a thread of its own, which must end."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:  # noqa: BLE001  # what the test looks at
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(DEADLOCK_S)
    assert found, "waits for ever"
    return found[0]


@pytest.mark.parametrize("kind", ENDS)
def test_a_call_that_would_end_the_thread_is_an_error_of_its_caller(
    loop: EngineLoop, kind: type[BaseException]
) -> None:
    def leave() -> None:
        raise kind("3")

    error = answer(lambda: loop.call(leave))
    assert isinstance(error, InternalError)
    assert isinstance(error.__cause__, kind)
    assert f"run on the engine's thread failed: {kind.__name__}: 3" in str(error)
    assert serves(loop)


def test_a_request_of_the_engines_own_thread_is_refused_and_nothing_hangs(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    for call in (
        lambda: llm.generate("Once", params),
        lambda: next(llm.stream("Once", params)),
    ):
        error = answer(lambda call=call: llm.run_on_engine(call))  # type: ignore[misc]
        assert isinstance(error, RequestError)
        assert "the engine's own thread" in str(error)
    assert len(llm.generate("Once", params)[0].outputs[0].token_ids) == 4
    assert llm.run_on_engine(lambda: llm.engine.rows.num_reqs) == 0


class Leaves(Scheduler):
    """Raises when it is to decide, until it is mended."""

    def __init__(self, inner: Scheduler, kind: type[BaseException]) -> None:
        self.inner, self.kind, self.is_mended = inner, kind, False

    def initial_state(self) -> Any:
        return self.inner.initial_state()

    def decide(self, view: SchedulerView, state: Any) -> tuple[Decision, Any]:
        if not self.is_mended:
            raise self.kind("a scheduler's whim")
        return self.inner.decide(view, state)


@pytest.mark.parametrize("kind", EVERYTHING)
def test_a_scheduler_that_leaves_fails_its_requests_and_the_loop_goes_on(
    start: Loops, parts: Composed, kind: type[BaseException]
) -> None:
    scheduler = Leaves(parts.scheduler, kind)
    loop = start(scheduler)
    error = error_of(loop.submit([request("unlucky")])[0])
    assert isinstance(error, InternalError)
    assert isinstance(error.__cause__, kind)
    scheduler.is_mended = True
    assert serves(loop)


@pytest.mark.parametrize("when", ["launch", "read"])
def test_a_step_that_leaves_fails_its_requests_and_the_loop_goes_on(
    loop: EngineLoop, when: str
) -> None:
    left: list[StepPlan] = []

    def leave(plan: StepPlan) -> None:
        if not left:
            left.append(plan)
            sys.exit(3)

    with seeing(loop.engine, **{when: leave}):
        error = error_of(loop.submit([request("unlucky")])[0])
        assert isinstance(error, InternalError)
        assert isinstance(error.__cause__, SystemExit)
        assert serves(loop)


class LeavesAtEnds(Endings):
    """An observer that leaves whenever a request ends."""

    def ended(self, ending: Ending) -> None:
        super().ended(ending)
        sys.exit(3)


def test_an_observer_that_leaves_keeps_no_reader_waiting_and_is_removed(loop: EngineLoop) -> None:
    observer = LeavesAtEnds()
    loop.observers.add(observer)
    one, two = loop.submit(
        [request("ends first", max_tokens=3), request("ends later", max_tokens=40)]
    )
    assert tokens(one) == expected_tokens(request("ends first", max_tokens=3))
    assert tokens(two) == expected_tokens(request("ends later", max_tokens=40))
    loop.call(lambda: None)
    assert len(observer.seen) == 1
    assert not loop.observers.is_on


def test_a_ledger_that_fails_at_a_release_keeps_no_reader_waiting(
    loop: EngineLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, failed = loop.engine.ledger.release, list[int]()

    def fail_once(lease: Any) -> None:
        release(lease)
        if not failed:
            failed.append(lease.row)
            raise RuntimeError("a ledger's bug")

    monkeypatch.setattr(loop.engine.ledger, "release", fail_once)
    assert serves(loop, "ended")
    assert failed
    assert serves(loop)


class NoGrammar:
    """A grammar whose parser panics."""

    def start(self) -> Any:
        raise Panic("index out of bounds")


def test_a_request_that_cannot_be_taken_in_is_answered_and_fails_alone(loop: EngineLoop) -> None:
    other = request("other", max_tokens=60)
    running, doomed = loop.submit([other, request("doomed", grammar=NoGrammar())])
    error = error_of(doomed)
    assert isinstance(error, InternalError)
    assert "Panic: index out of bounds" in str(error)
    assert tokens(running) == expected_tokens(other)


def test_an_engine_that_cannot_begin_anew_answers_everybody_and_says_why(
    start: Loops, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = start()
    queued: list[Running] = []
    call: Future[None] = Future()

    def leave(_: StepPlan) -> None:
        """More is in the inbox by then."""
        queued.extend(loop.submit([request("queued")]))
        loop._inbox.put(LoopCall(lambda: None, call))
        sys.exit(3)

    with monkeypatch.context() as patch, seeing(loop.engine, launch=leave):
        patch.setattr(loop.engine, "make_arrays", functools.partial(sys.exit, 4))
        tickets = loop.submit([request(f"one of {i}") for i in range(6)])
        assert all(isinstance(error_of(ticket), InternalError) for ticket in [*tickets, *queued])
        assert isinstance(call.exception(DEADLOCK_S), InternalError)
        later = answer(lambda: loop.call(lambda: None))
        assert isinstance(later, StoppedError | InternalError)
        loop._thread.join(DEADLOCK_S)
        with pytest.raises(StoppedError, match=r"broke down \(SystemExit: 4\): make a new one"):
            loop.submit([request("late")])
        loop.close()
    loop.engine.make_arrays()


@pytest.mark.parametrize("kind", EVERYTHING)
def test_a_tokenizer_that_panics_fails_its_request_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    decode = llm.tokenizer.decode
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    expected = llm.generate("The other", params)[0].outputs

    def fail(token_ids: Any, **options: Any) -> str:
        if not options["skip_special_tokens"]:
            raise kind("the tokenizer panicked")
        return decode(token_ids, **options)

    monkeypatch.setattr(llm.tokenizer, "decode", fail)
    doomed = params.model_copy(update={"skip_special_tokens": False})
    for call in (
        lambda: llm.generate(["Once", "The other"], [doomed, params]),
        lambda: list(llm.stream("Once", doomed)),
        lambda: asyncio.run(llm.agenerate("Once", doomed)),
    ):
        error = answer(call)
        assert isinstance(error, InternalError), error
        assert isinstance(error.__cause__, kind)
    assert llm.generate("The other", params)[0].outputs == expected
    assert llm.run_on_engine(lambda: llm.engine.rows.num_reqs) == 0


@pytest.mark.parametrize("kind", ENDS)
def test_a_tokenizer_that_panics_while_a_prompt_is_read_does_not_end_the_event_loop(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    encode = llm.tokenizer.encode

    def fail(text: str, **options: Any) -> list[int]:
        if text == "doomed":
            raise kind("the tokenizer panicked")
        return encode(text, **options)

    async def both() -> list[Any]:
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        calls = (llm.agenerate(text, params) for text in ("doomed", "fine"))
        return await asyncio.gather(*calls, return_exceptions=True)

    monkeypatch.setattr(llm.tokenizer, "encode", fail)
    error, outputs = answer(lambda: asyncio.run(both()))
    assert isinstance(error, InternalError)
    assert isinstance(error.__cause__, kind)
    assert len(outputs[0].outputs[0].token_ids) == 4
