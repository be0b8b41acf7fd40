"""Helpers for tests of the serving loop: loops on fake and real engines, requests, step hooks."""

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
from enginebay.compose.composition import Composed, build, make_plan
from enginebay.config import EngineConfig
from enginebay.contracts.engine import Engine, StepPlan
from enginebay.contracts.scheduler import Decision, Scheduler, SchedulerView
from enginebay.outputs import RequestOutput
from enginebay.serving.loop import EngineLoop
from enginebay.serving.observer import Ending, Update
from enginebay.serving.running import Running, TokenEvent
from enginebay.types import Request
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
    """A step hook that does nothing."""


def tiny(name: str, **options: Any) -> EngineConfig:
    """A configuration of TINY with the fake engine's sizes; its engine compiles only in warm-up."""
    fixed: dict[str, Any] = {"model": TINY, "processors": (), "forbid_compiling": True}
    return EngineConfig(**fixed, **SIZES, engine={"name": name, **options})  # type: ignore[arg-type]


def compose_real(name: str, **options: Any) -> Composed:
    """A warm engine of `tiny`, for tests that start loops on it."""
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
    """An engine of `kind` "fake" or "real" with an empty cache. Later tests use it again."""
    if kind == "fake":
        yield fresh(_fake(name, tuple(sorted(options.items()))))
    else:
        with pool.leases():
            yield compose_real(name, **options)


def fresh(parts: Composed) -> Composed:
    """Empty the cache of an engine, and return its parts."""
    parts.engine.drop_arrays()
    parts.engine.make_arrays()
    return parts


def make_llm(name: str, **options: Any) -> LLM:
    """A warm LLM of `tiny`."""
    llm = LLM(config=tiny(name, **options))
    llm.warmup()
    return llm


def make_prompt(seed: int, length: int) -> np.ndarray:
    """A random prompt. TINY's vocabulary contains all its tokens, so every engine can run it."""
    return (
        np.random.default_rng(seed).integers(NUM_SPECIAL, TINY_VOCAB_SIZE, length).astype(np.int32)
    )


def request(name: str, length: int = 5, max_tokens: int = 12, **fields: Any) -> Request:
    """A request without stop tokens, whose prompt depends on name and length."""
    prompt = make_prompt(sum(map(ord, name)), length)
    made = make_request(name, length, max_tokens, **fields)
    return dataclasses.replace(made, prompt_token_ids=prompt)


def alike(name: str, length: int, max_tokens: int, **fields: Any) -> Request:
    """A request whose prompt has one prefix for even lengths, and another for odd lengths."""
    prompt = make_prompt(length % 2, length)
    return dataclasses.replace(request(name, length, max_tokens, **fields), prompt_token_ids=prompt)


def family(
    name: str, length: int, max_tokens: int, n: int = 4, temperature: float = 0.9
) -> list[Request]:
    """The `n` sampled requests of one prompt, as a user's n=4 makes them."""
    one = alike(name, length, max_tokens, temperature=temperature)
    return [
        dataclasses.replace(one, request_id=f"{name}/{i}", parent_id=name, index=i, key=(1, 2))
        for i in range(n)
    ]


def events(ticket: Running) -> list[TokenEvent]:
    """All events of a request. Each must arrive within DEADLOCK_S."""
    found = [ticket.get(DEADLOCK_S)]
    while found[-1].finish_reason is None:
        found.append(ticket.get(DEADLOCK_S))
    return found


def tokens(ticket: Running) -> list[int]:
    """All tokens of a request, which must end without an error."""
    found = events(ticket)
    assert found[-1].error is None
    return [token for event in found for token in event.token_ids]


def all_tokens(tickets: Sequence[Running]) -> list[list[int]]:
    """The tokens of several requests."""
    return [tokens(ticket) for ticket in tickets]


def loop_threads() -> set[threading.Thread]:
    """The threads of all loops that are not closed."""
    return {thread for thread in threading.enumerate() if thread.name == "enginebay-loop"}


class Loops:
    """Starts loops on one engine, one after the other. `close` checks that no row or page is
    leaked.
    """

    def __init__(self, parts: Composed) -> None:
        self.parts = parts
        self._made: list[EngineLoop] = []
        self._before = loop_threads()
        self._num_free_tokens = parts.engine.ledger.num_free_tokens

    def __call__(self, scheduler: Scheduler | None = None, **changes: Any) -> EngineLoop:
        """Start a loop with a changed configuration. The loop before it must be closed or idle."""
        parts = self.parts
        config = parts.plan.config.model_copy(update=changes)
        self._made.append(EngineLoop(parts.engine, scheduler or parts.scheduler, config))
        return self._made[-1]

    def check(self) -> None:
        """Check that no row or page is in use.

        Call it on the loop's thread, or after that has ended.
        """
        engine = self.parts.engine
        engine.ledger.check()
        assert (engine.rows.num_reqs, engine.ledger.num_free_tokens) == (0, self._num_free_tokens)

    def close(self) -> None:
        """Close all loops, and check the engine."""
        for loop in self._made:
            loop.close()
        assert loop_threads() <= self._before
        self.check()


def running(parts: Composed) -> Iterator[Loops]:
    """The body of a fixture that yields Loops and closes them."""
    loops = Loops(parts)
    yield loops
    loops.close()


def alone(parts: Composed, requests: Sequence[Request]) -> list[list[int]]:
    """The tokens of each request when it runs alone. No other loop may use the engine meanwhile."""
    loop = EngineLoop(parts.engine, parts.scheduler, parts.plan.config)
    try:
        return [
            tokens(loop.submit([dataclasses.replace(one, parent_id="")])[0]) for one in requests
        ]
    finally:
        loop.close()


def go_on(loop: EngineLoop, *, paused: bool = False) -> None:
    """Resume a paused loop, or pause it."""
    loop.call(functools.partial(setattr, loop, "is_paused", paused))


@contextlib.contextmanager
def held(loop: EngineLoop) -> Iterator[None]:
    """Pause a loop within the block: requests submitted in it start together at its end."""
    go_on(loop, paused=True)
    try:
        yield
    finally:
        go_on(loop)


def generate_at_once(llm: LLM, prompts: list[Any], params: Any, **more: Any) -> list[RequestOutput]:
    """Call generate() with the loop paused until all prompts are queued."""
    with ThreadPoolExecutor(1) as pool, held(llm.loop):
        outputs = pool.submit(llm.generate, prompts, params, **more)
        while llm.loop.num_waiting < len(prompts):
            assert not outputs.done()
            time.sleep(0.001)
    return outputs.result()


class Pauses:
    """A step hook that pauses a loop when it launches its step number `after`."""

    def __init__(self, loop: EngineLoop, after: int) -> None:
        self._loop, self._left, self._reached = loop, after, threading.Event()

    def __call__(self, plan: StepPlan) -> None:
        self._left -= 1
        if not self._left:
            self._loop.is_paused = True
            self._reached.set()

    def wait(self) -> None:
        """Wait until the loop is paused."""
        assert self._reached.wait(DEADLOCK_S)


class PausesAfter(Endings):
    """An observer that pauses a loop when the request `request_id` has ended."""

    def __init__(self, loop: EngineLoop, request_id: str) -> None:
        super().__init__()
        self._loop, self._request_id = loop, request_id

    def ended(self, ending: Ending) -> None:
        super().ended(ending)
        if ending.request.request_id == self._request_id:
            self._loop.is_paused = True


@contextlib.contextmanager
def seeing(engine: Engine, launch: See = ignore, read: See = ignore) -> Iterator[None]:
    """Call `launch` before each step is launched, and `read` before its tokens are read.

    Both may raise an exception.
    """
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
    """A step hook that raises at the first step for which `which` returns true."""

    def __init__(self, which: Callable[[StepPlan], bool] = is_decode) -> None:
        self.which, self.has_failed = which, False

    def __call__(self, plan: StepPlan) -> None:
        if not self.has_failed and self.which(plan):
            self.has_failed = True
            raise RuntimeError("the device is gone")


class Once:
    """A step hook that calls `act` at the first step for which `which` returns true."""

    def __init__(
        self, act: Callable[[], object], which: Callable[[StepPlan], bool] = lambda _: True
    ) -> None:
        self.act, self.which, self._done = act, which, False

    def __call__(self, plan: StepPlan) -> None:
        if not self._done and self.which(plan):
            self._done = True
            self.act()


class Unread:
    """Counts the steps that are launched and not yet read: now, and at most."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def launch(self, plan: StepPlan) -> None:
        """The hook for each launch."""
        self.most = max(self.most, self.now)  # when another one is about to be launched
        self.now += 1

    def read(self, plan: StepPlan) -> None:
        """The hook for each read."""
        self.now -= 1


class Prefilled:
    """A step hook that counts the tokens of each prefill step."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def __call__(self, plan: StepPlan) -> None:
        if not plan.is_decode:
            self.counts.append(sum(row.num_tokens for row in plan.rows))


class Counts(Endings):
    """An observer that counts preemptions and keeps the endings."""

    def __init__(self) -> None:
        super().__init__()
        self.num_preempted = 0

    def updated(self, update: Update) -> None:
        self.num_preempted += update.num_preempted


class Preempting(Scheduler):
    """Wraps a scheduler, and preempts each request once, after `after` of its 12 new tokens."""

    def __init__(self, inner: Scheduler, after: int) -> None:
        self.inner, self.after = inner, after
        self.preempted: set[str] = set()

    def initial_state(self) -> frozenset[str]:
        return frozenset()

    def decide(self, view: SchedulerView, state: frozenset[str]) -> tuple[Decision, frozenset[str]]:
        ripe = [
            row.request_id
            for row in view.running
            if row.request_id not in state
            and row.num_left == 0
            and row.max_new_left <= 12 - self.after
        ]
        if ripe:
            self.preempted.update(ripe)
            return Decision(preempt=tuple(ripe)), state | set(ripe)
        return self.inner.decide(view, self.inner.initial_state())[0], state
