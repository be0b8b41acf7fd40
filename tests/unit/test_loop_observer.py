"""What the loop tells its observers: updates, steps and endings, in order, and nothing that could
harm the service.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from enginebay.compose.composition import Composed
from enginebay.ops.spec import Bucket
from enginebay.serving.loop import EngineLoop
from enginebay.serving.observer import Ending, Execution, Observer, Observers, Update
from tests.fake_engine import Launched
from tests.pool import EnginePool
from tests.unit.loops import (
    MAX_NUM_SEQS,
    OPTIONS,
    FailsOnce,
    Loops,
    Pauses,
    Preempting,
    all_tokens,
    composed,
    events,
    go_on,
    held,
    request,
    running,
    seeing,
    tokens,
)


class Notes(Observer):
    """Keeps what it is told, and on which threads."""

    def __init__(self) -> None:
        self.updates: list[Update] = []
        self.executions: list[Execution] = []
        self.endings: list[Ending] = []
        self.threads: set[str] = set()

    def updated(self, update: Update) -> None:
        self.threads.add(threading.current_thread().name)
        self.updates.append(update)

    def executed(self, execution: Execution) -> None:
        self.executions.append(execution)

    def ended(self, ending: Ending) -> None:
        self.endings.append(ending)


@pytest.fixture(params=["vinference", "oengine"])
def parts(request: pytest.FixtureRequest, engine_pool: EnginePool) -> Iterator[Composed]:
    with composed(engine_pool, "fake", request.param, **OPTIONS[request.param]) as made:
        yield made


@pytest.fixture
def start(parts: Composed) -> Iterator[Loops]:
    yield from running(parts)


@pytest.fixture
def loop(start: Loops) -> EngineLoop:
    return start()


def test_an_observer_is_told_of_every_update_step_and_ending(loop: EngineLoop) -> None:
    notes = Notes()
    loop.observers.add(notes)
    num_free_tokens = loop.call(lambda: loop.engine.ledger.num_free_tokens)
    with held(loop):
        tickets = loop.submit(
            [request(f"seen {i}", length=20, max_tokens=5) for i in range(MAX_NUM_SEQS)]
        )
    all_tokens(tickets)
    loop.call(lambda: None)
    assert notes.threads == {"enginebay-loop"}
    assert sum(execution.num_new_tokens for execution in notes.executions) == 5 * MAX_NUM_SEQS
    assert sum(one.num_prompt_tokens for one in notes.executions) == 20 * MAX_NUM_SEQS
    assert not notes.executions[-1].num_prompt_tokens, "a decode"
    prefill = notes.updates[0]
    assert (prefill.num_rows, prefill.num_tokens) == (2, 32), "a step takes 32 tokens of the prompt"
    assert prefill.num_waiting + prefill.num_running == MAX_NUM_SEQS
    assert prefill.num_free_tokens < num_free_tokens
    assert sum(update.num_rows for update in notes.updates) == sum(
        e.num_rows for e in notes.executions
    )
    assert sum(u.num_tokens for u in notes.updates) >= 20 * MAX_NUM_SEQS + 4 * MAX_NUM_SEQS
    assert sum(u.num_tokens for u in notes.updates) == sum(e.num_tokens for e in notes.executions)
    assert not any(e.num_bucket_tokens for e in notes.executions), "this engine has no buckets"
    for update in notes.updates:
        assert min(update.schedule_s, update.launch_s) > 0
    times = [execution.at_s for execution in notes.executions]
    assert times == sorted(times)
    busy_s = sum(execution.execute_s for execution in notes.executions)
    assert 0 < busy_s <= times[-1] - (notes.updates[0].at_s - notes.updates[0].launch_s), (
        "none overlap"
    )
    assert {e.request.request_id for e in notes.endings} == {t.request.request_id for t in tickets}
    assert {(e.reason, e.metrics.num_generated_tokens) for e in notes.endings} == {("length", 5)}


def test_the_bucket_of_a_step_shows_its_padding(
    loop: EngineLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = Bucket(48, 2, 1, 32, 64)
    monkeypatch.setattr(Launched, "bucket", bucket)
    notes = Notes()
    loop.observers.add(notes)
    all_tokens(loop.submit([request("padded", length=20, max_tokens=5)]))
    loop.call(lambda: None)
    prefill, *decodes = notes.executions
    assert (prefill.num_tokens, prefill.num_bucket_tokens, prefill.bucket) == (20, 48, bucket)
    assert decodes
    assert all(one.num_bucket_tokens == 48 * one.num_tokens > 0 for one in decodes), "one row"


def test_preemptions_are_counted_with_the_next_update(start: Loops, parts: Composed) -> None:
    loop, notes = start(Preempting(parts.scheduler, 3)), Notes()
    loop.observers.add(notes)
    all_tokens(loop.submit([request(f"row {i}") for i in range(MAX_NUM_SEQS)]))
    assert sum(update.num_preempted for update in notes.updates) == MAX_NUM_SEQS


def test_aborts_and_failures_are_endings_too(loop: EngineLoop) -> None:
    notes = Notes()
    loop.observers.add(notes)
    with held(loop):
        [ticket] = loop.submit([request("aborted")])
        loop.abort("aborted")
    events(ticket)
    with seeing(loop.engine, read=FailsOnce()):
        events(loop.submit([request("unlucky")])[0])
    tokens(loop.submit([request("after", max_tokens=3)])[0])
    told = [(ending.request.request_id, ending.reason) for ending in notes.endings]
    assert told == [("aborted", "abort"), ("unlucky", "error"), ("after", "length")]


def test_tokens_of_a_request_that_has_ended_meanwhile_are_not_counted(loop: EngineLoop) -> None:
    """It is aborted when its first token is read, while its next step runs."""
    notes = Notes()
    loop.observers.add(notes)
    with seeing(loop.engine, read=lambda *_: loop.abort("left")):
        told = events(loop.submit([request("left")])[0])
        loop.call(lambda: None)
    assert told[-1].finish_reason == "abort"
    assert len(notes.executions) > 1
    num_told = sum(len(event.token_ids) for event in told)
    assert sum(execution.num_new_tokens for execution in notes.executions) == num_told


class Broken(Notes):
    """Cannot cope with a step."""

    def executed(self, execution: Execution) -> None:
        super().executed(execution)
        raise ZeroDivisionError("an observer's bug")


def test_an_observer_that_raises_is_removed_and_nothing_else_changes(
    loop: EngineLoop, caplog: pytest.LogCaptureFixture
) -> None:
    broken, notes = Broken(), Notes()
    loop.observers.add(broken)
    loop.observers.add(notes)
    with caplog.at_level(logging.ERROR, "enginebay.loop"):
        assert len(tokens(loop.submit([request("lucky")])[0])) == 12
    assert len(broken.executions) == 1 < len(notes.executions)
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "an observer of type Broken failed"
    ]
    assert sum(execution.num_new_tokens for execution in notes.executions) == 12


def test_a_removed_observer_hears_nothing_and_nobody_is_no_cost(
    loop: EngineLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = Notes()
    loop.observers.add(notes)
    tokens(loop.submit([request("heard", max_tokens=3)])[0])
    loop.observers.remove(notes)
    loop.observers.remove(notes)
    heard = (len(notes.updates), len(notes.executions), len(notes.endings))
    assert min(heard) > 0
    assert not loop.observers.is_on
    for name in ("decided", "carried_out", "launched", "read", "ended", "preempted"):
        monkeypatch.setattr(Observers, name, None)  # calling it would fail the step
    assert len(tokens(loop.submit([request("unheard", max_tokens=3)])[0])) == 3
    assert heard == (len(notes.updates), len(notes.executions), len(notes.endings))


def test_observing_may_begin_and_end_in_the_middle(loop: EngineLoop) -> None:
    go_on(loop, paused=True)
    ticket = loop.submit([request("long", max_tokens=100)])[0]
    for _ in range(3):
        notes, pauses = Notes(), Pauses(loop, after=3)
        with seeing(loop.engine, launch=pauses):
            loop.observers.add(notes)
            go_on(loop)
            pauses.wait()
            loop.observers.remove(notes)
        assert min(len(notes.updates), len(notes.executions)) > 0
        assert not notes.endings
    go_on(loop)
    assert len(tokens(ticket)) == 100
    assert len(tokens(loop.submit([request("next", max_tokens=3)])[0])) == 3
