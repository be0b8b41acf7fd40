"""eSurge serves while most of its programs are still compiled, and compiles none for a request."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from enginebay.contracts.step_key import StepKey
from enginebay_esurge import eSurge
from enginebay_runtime.background import Background
from enginebay_runtime.compiling import StepCompiler
from enginebay_runtime.programs import cost, covering, first_steps, parts_of, program_name
from tests.fake_engine import FakeEngine
from tests.unit.esurge.conftest import Make
from tests.unit.esurge.small import GREEDY, HOT_ON, LONG, PROMPT, PROMPTS, token_ids, with_
from tests.unit.serving import DEADLOCK_S

pytestmark = pytest.mark.xdist_group("esurge")

LONG_PROMPT = list(range(500, 560))


@dataclasses.dataclass
class Compiler:
    """A compiler that takes the programs it is asked for from those that there were, and waits on
    the background thread until it is let go.
    """

    known: dict[Any, Any]
    asked: list[tuple[str, StepKey]] = dataclasses.field(default_factory=list)
    begun: threading.Event = dataclasses.field(default_factory=threading.Event)
    may_end: threading.Event = dataclasses.field(default_factory=threading.Event)

    def compile(self, key: StepKey, name: Any) -> Any:
        thread = threading.current_thread().name
        self.asked.append((thread, key))
        if thread.startswith("enginebay-compile"):
            self.begun.set()
            assert self.may_end.wait(DEADLOCK_S)
        return self.known[name]


@pytest.fixture
def compiler(real_engine: eSurge, monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    """Compiles for the real engine, which has forgotten its programs."""
    runner = real_engine.engine.executor
    made = Compiler(dict(runner._programs))
    monkeypatch.setattr(StepCompiler, "lower", lambda _, key: program_name(key, runner.layouts))
    monkeypatch.setattr(StepCompiler, "compile", lambda _, key, name: made.compile(key, name))
    monkeypatch.setattr(runner, "_programs", {})
    monkeypatch.setattr(runner, "_chosen", {})
    yield made
    made.may_end.set()


def answers(engine: eSurge) -> list[list[int]]:
    """Prompts one by one, together, and of several chunks."""
    alone = [engine.generate(prompt, HOT_ON)[0] for prompt in PROMPTS[:2]]
    several = engine.generate([*PROMPTS, LONG_PROMPT], HOT_ON)
    found_again = engine.generate([LONG_PROMPT], with_(LONG, max_tokens=4))
    return token_ids([*alone, *several, *found_again])


@pytest.mark.long
def test_steps_take_larger_programs_until_theirs_are_compiled(
    real_engine: eSurge, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    wanted = answers(real_engine)
    compiler: Compiler = request.getfixturevalue("compiler")
    inner = real_engine.engine
    keys = inner.geometry.all_steps()
    others: Background = real_engine.run_on_engine(inner.begin_warmup)
    first = first_steps(keys, inner.parts.free_padding_rows)
    assert set(inner.executor.programs) == set(first)
    assert len(first) < len(keys)
    count = inner.compilations.count
    others.start()
    assert compiler.begun.wait(DEADLOCK_S)
    assert answers(real_engine) == wanted
    assert (inner.compilations.count, inner.compilations.forbidden) == (count, True)
    compiler.may_end.set()
    assert others.wait(DEADLOCK_S)
    assert set(inner.executor.programs) == set(keys)
    assert answers(real_engine) == wanted
    num_first = len({part for key in first for part in parts_of(key)})
    later = compiler.asked[num_first:]
    in_order = sorted(
        set(keys) - set(first), key=lambda key: (key not in covering(keys), *cost(key))
    )
    wanted_parts = dict.fromkeys(part for key in in_order for part in parts_of(key))
    known = {part for key in first for part in parts_of(key)}
    assert [key for _, key in later] == [part for part in wanted_parts if part not in known]
    assert {thread.rpartition("_")[0] for thread, _ in later} == {"enginebay-compile"}


@pytest.mark.long
def test_warmup_waits_for_all_and_nothing_is_compiled_twice(
    real_engine: eSurge, compiler: Compiler
) -> None:
    inner = real_engine.engine
    others: Background = real_engine.run_on_engine(inner.begin_warmup)
    compiler.may_end.set()
    others.start()
    real_engine.run_on_engine(inner.warmup)
    assert set(inner.executor.programs) == set(inner.geometry.all_steps())
    assert others.wait(DEADLOCK_S)
    assert len(compiler.asked) == len({key for _, key in compiler.asked})


def test_terminating_ends_compiling_after_one_program_and_initiating_goes_on(
    make_faked: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = threading.Event(), threading.Event()
    compiled: list[int] = []

    def compile_one(number: int) -> None:
        begun.set()
        assert may_end.wait(DEADLOCK_S)
        compiled.append(number)

    jobs = [lambda n=n: compile_one(n) for n in range(9)]
    others = Background(jobs, "enginebay-compile")
    monkeypatch.setattr(FakeEngine, "begin_warmup", lambda *_: others)
    engine = make_faked()
    assert not begun.is_set(), "nothing is served yet"
    engine.initiate()
    assert begun.wait(DEADLOCK_S)
    assert engine.generate(PROMPT, GREEDY)[0].finished
    assert engine.engine.compilations.forbidden
    engine.pause()
    engine.resume()
    ending = threading.Thread(target=engine.terminate)
    ending.start()
    while not others._stopping.is_set():
        ending.join(0.001)
    may_end.set()
    ending.join(DEADLOCK_S)
    assert not ending.is_alive()
    assert compiled == [0]
    engine.initiate()
    assert others.wait(DEADLOCK_S)
    assert compiled == list(range(9))
