"""What tests of the serving loop share: loops on fake and real engines, requests, steps that are seen."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from enginebay import LLM
from enginebay.build.compose import Composed, build, make_plan
from enginebay.config import EngineConfig
from enginebay.engine import Engine, StepPlan
from enginebay.loop.loop import EngineLoop
from enginebay.loop.messages import Ticket, TokenEvent
from enginebay.loop.observer import Ending, Update
from enginebay.scheduler import Decision, Scheduler, SchedulerView
from enginebay.types import Request, RequestOutput
from tests.brief import TINY
from tests.fake_engine import NUM_SPECIAL, FakeEngine
from tests.fakes import SIZES, compose_fake, make_request
from tests.pool import EnginePool
from tests.unit.serving import DEADLOCK_S, Endings

PAGE_SIZE, NUM_PAGES = 8, 25
PAGED: dict[str, Any] = {"page_size": PAGE_SIZE, "num_pages": NUM_PAGES, "prefix_caching": True}
"""Options of a paged engine with too few pages for four long requests."""

OPTIONS: dict[str, dict[str, Any]] = {"vinference": {}, "oengine": PAGED}

MAX_NUM_SEQS: int = SIZES["max_num_seqs"]
TINY_VOCAB_SIZE = 96
See = Callable[[StepPlan], None]


def ignore(plan: StepPlan) -> None:
    """Nothing is done about a step."""


def tiny(name: str, **options: Any) -> EngineConfig:
    """The engine on the smallest model, in the fake one's sizes; it compiles in its warm-up alone."""
    fixed: dict[str, Any] = {"model": TINY, "processors": (), "forbid_compiling": True}
    return EngineConfig(**fixed, **SIZES, engine={"name": name, **options})  # type: ignore[arg-type]


def compose_real(name: str, **options: Any) -> Composed:
    """Such an engine for loops, warm; tests lease it from the pool."""
    parts = build(make_plan(tiny(name, **options)))
    parts.engine.make_arrays()
    parts.engine.warmup()
    parts.engine.compilations.forbidden = True
    return parts


@functools.cache
def _fake(name: str, options: tuple[tuple[str, Any], ...]) -> Composed:
    return compose_fake(name, dict(options))


@contextlib.contextmanager
def composed(pool: EnginePool, kind: str, name: str, **options: Any) -> Iterator[Composed]:
    """The fake engine or the "real" one: kept for other tests, without prefixes of earlier ones."""
    if kind == "fake":
        yield fresh(_fake(name, tuple(sorted(options.items()))))
    else:
        with pool.leases():
            yield compose_real(name, **options)


def fresh(parts: Composed) -> Composed:
    """The same with an empty cache."""
    parts.engine.drop_arrays()
    parts.engine.make_arrays()
    return parts


def make_llm(name: str, **options: Any) -> LLM:
    """An LLM with such an engine, warm."""
    llm = LLM(config=tiny(name, **options))
    llm.warmup()
    return llm


def make_prompt(seed: int, length: int) -> np.ndarray:
    """Any engine of these tests has its tokens."""
    return np.random.default_rng(seed).integers(NUM_SPECIAL, TINY_VOCAB_SIZE, length).astype(np.int32)


def request(name: str, length: int = 5, max_tokens: int = 12, **fields: Any) -> Request:
    """A prompt that depends on the name and length, never ended by a stop token."""
    prompt = make_prompt(sum(map(ord, name)), length)
    made = make_request(name, length, max_tokens, **fields)
    return dataclasses.replace(made, prompt_token_ids=prompt)


def alike(name: str, length: int, max_tokens: int, **fields: Any) -> Request:
    """A prompt that begins like all others whose length has its parity."""
    prompt = make_prompt(length % 2, length)
    return dataclasses.replace(request(name, length, max_tokens, **fields), prompt_token_ids=prompt)


def family(name: str, length: int, max_tokens: int, n: int = 4, temperature: float = 0.9) -> list[Request]:
    """The requests of one prompt."""
    one = alike(name, length, max_tokens, temperature=temperature)
    return [
        dataclasses.replace(one, request_id=f"{name}/{i}", parent_id=name, index=i, key=(1, 2))
        for i in range(n)
    ]


def events(ticket: Ticket) -> list[TokenEvent]:
    """All events to the last, each within reason."""
    found = [ticket.get(DEADLOCK_S)]
    while found[-1].finish_reason is None:
        found.append(ticket.get(DEADLOCK_S))
    return found


def tokens(ticket: Ticket) -> list[int]:
    """All tokens of a request that ends as it should."""
    found = events(ticket)
    assert found[-1].error is None
    return [token for event in found for token in event.token_ids]


def all_tokens(tickets: Sequence[Ticket]) -> list[list[int]]:
    """The same of several."""
    return [tokens(ticket) for ticket in tickets]


def loop_threads() -> set[threading.Thread]:
    """The threads of all loops that are not closed."""
    return {thread for thread in threading.enumerate() if thread.name == "enginebay-loop"}


class Loops:
    """Starts loops on one engine, one after the other; in the end it looks at the books."""

    def __init__(self, parts: Composed) -> None:
        self.parts = parts
        self._made: list[EngineLoop] = []
        self._before = loop_threads()
        self._num_free_tokens = parts.engine.ledger.num_free_tokens

    def __call__(self, scheduler: Scheduler | None = None, **changes: Any) -> EngineLoop:
        """Starts one, with changes of the configuration; the one before is closed or has nothing to do."""
        parts = self.parts
        config = parts.plan.config.model_copy(update=changes)
        self._made.append(EngineLoop(parts.engine, scheduler or parts.scheduler, config))
        return self._made[-1]

    def check(self) -> None:
        """All is free, and the books are right. On the engine's thread, or when that has ended."""
        engine = self.parts.engine
        engine.ledger.check()
        assert (engine.rows.num_reqs, engine.ledger.num_free_tokens) == (0, self._num_free_tokens)

    def close(self) -> None:
        """End them."""
        for loop in self._made:
            loop.close()
        assert loop_threads() <= self._before
        self.check()


def running(parts: Composed) -> Iterator[Loops]:
    """What a fixture of loops yields."""
    loops = Loops(parts)
    yield loops
    loops.close()


def alone(parts: Composed, requests: Sequence[Request]) -> list[list[int]]:
    """The tokens of requests that are alone and know of no others, while no loop uses the engine."""
    loop = EngineLoop(parts.engine, parts.scheduler, parts.plan.config)
    try:
        return [tokens(loop.submit([dataclasses.replace(one, parent_id="")])[0]) for one in requests]
    finally:
        loop.close()


def go_on(loop: EngineLoop, *, paused: bool = False) -> None:
    """Let a loop that is paused launch steps again, or pause it."""
    loop.call(functools.partial(setattr, loop, "is_paused", paused))


@contextlib.contextmanager
def held(loop: EngineLoop) -> Iterator[None]:
    """What is submitted within the block begins at its end; nothing is launched before."""
    go_on(loop, paused=True)
    try:
        yield
    finally:
        go_on(loop)


def generate_at_once(llm: LLM, prompts: list[Any], params: Any, **more: Any) -> list[RequestOutput]:
    """generate(), begun when all prompts are queued."""
    with ThreadPoolExecutor(1) as pool, held(llm.loop):
        outputs = pool.submit(llm.generate, prompts, params, **more)
        while llm.loop.num_waiting < len(prompts):
            assert not outputs.done()
            time.sleep(0.001)
    return outputs.result()


class Pauses:
    """Pauses a loop when it launches its step number `after`, so that what runs is still running."""

    def __init__(self, loop: EngineLoop, after: int) -> None:
        self._loop, self._left, self._reached = loop, after, threading.Event()

    def __call__(self, plan: StepPlan) -> None:
        self._left -= 1
        if not self._left:
            self._loop.is_paused = True
            self._reached.set()

    def wait(self) -> None:
        """Until then."""
        assert self._reached.wait(DEADLOCK_S)


class PausesAfter(Endings):
    """Pauses a loop when a request has ended."""

    def __init__(self, loop: EngineLoop, request_id: str) -> None:
        super().__init__()
        self._loop, self._request_id = loop, request_id

    def ended(self, ending: Ending) -> None:
        super().ended(ending)
        if ending.request.request_id == self._request_id:
            self._loop.is_paused = True


@contextlib.contextmanager
def seeing(engine: Engine, launch: See = ignore, read: See = ignore) -> Iterator[None]:
    """`launch` sees every step before it is launched, `read` before it is read; they may raise."""
    with pytest.MonkeyPatch.context() as patch:
        if isinstance(engine, FakeEngine):
            patch.setattr(engine, "before_step", launch)
            patch.setattr(engine, "before_read", read)
        else:
            patch.setattr(engine, "step", functools.partial(_seen, engine.step, launch, read))
        yield


def _seen(step: Callable[[StepPlan], Any], launch: See, read: See, plan: StepPlan) -> Any:
    launch(plan)
    pending = step(plan)
    get = pending.read

    def seen() -> np.ndarray:
        read(plan)
        tokens: np.ndarray = get()
        return tokens

    pending.read = seen
    return pending


def is_decode(plan: StepPlan) -> bool:
    """Whether a step decodes."""
    return plan.is_decode


class FailsOnce:
    """Raises the first time that it sees a step for which `which` holds."""

    def __init__(self, which: Callable[[StepPlan], bool] = is_decode) -> None:
        self.which, self.has_failed = which, False

    def __call__(self, plan: StepPlan) -> None:
        if not self.has_failed and self.which(plan):
            self.has_failed = True
            raise RuntimeError("the device is gone")


class Once:
    """Calls a function when it sees the first step for which `which` holds."""

    def __init__(self, act: Callable[[], object], which: Callable[[StepPlan], bool] = lambda _: True) -> None:
        self.act, self.which, self._done = act, which, False

    def __call__(self, plan: StepPlan) -> None:
        if not self._done and self.which(plan):
            self._done = True
            self.act()


class Unread:
    """How many steps are launched and not read: now, and at most."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def launch(self, plan: StepPlan) -> None:
        """To be called with each."""
        self.most = max(self.most, self.now)  # when another one is about to be launched
        self.now += 1

    def read(self, plan: StepPlan) -> None:
        """The same."""
        self.now -= 1


class Prefilled:
    """Counts the tokens of each prefill step."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def __call__(self, plan: StepPlan) -> None:
        if not plan.is_decode:
            self.counts.append(sum(row.num_tokens for row in plan.rows))


class Counts(Endings):
    """Counts preemptions that were followed by a step, and keeps the endings."""

    def __init__(self) -> None:
        super().__init__()
        self.num_preempted = 0

    def updated(self, update: Update) -> None:
        self.num_preempted += update.num_preempted


class Preempting(Scheduler):
    """Another scheduler that preempts each request once, when it has `after` new tokens of its 12."""

    def __init__(self, inner: Scheduler, after: int) -> None:
        self.inner, self.after = inner, after
        self.preempted: set[str] = set()

    def initial_state(self) -> frozenset[str]:
        return frozenset()

    def decide(self, view: SchedulerView, state: frozenset[str]) -> tuple[Decision, frozenset[str]]:
        ripe = [
            row.request_id
            for row in view.running
            if row.request_id not in state and row.num_left == 0 and row.max_new_left <= 12 - self.after
        ]
        if ripe:
            self.preempted.update(ripe)
            return Decision(preempt=tuple(ripe)), state | set(ripe)
        return self.inner.decide(view, self.inner.initial_state())[0], state
