"""The engines of the eSurge tests: fake ones, which are made in milliseconds, and a real one of the
pool.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from enginebay_esurge import eSurge
from tests.brief import BRIEF
from tests.unit.esurge.small import OPTIONS, REAL, Slow, assert_idle

if TYPE_CHECKING:
    from tests.pool import EnginePool

Make = Callable[..., eSurge]


@pytest.fixture
def make_faked(faked: None) -> Iterator[Make]:
    """Makes an eSurge over a fake engine, not initiated; it must hold nothing when a test is
    over.
    """
    made = []

    def make(**changes: Any) -> eSurge:
        made.append(eSurge(BRIEF, **OPTIONS | changes))
        return made[-1]

    yield make
    for one in made:
        one.terminate()
        assert_idle(one)


@pytest.fixture
def engine(make_faked: Make) -> Iterator[eSurge]:
    """One that serves, and must hold nothing when a test is over."""
    with make_faked() as engine:
        yield engine
        assert_idle(engine)


@pytest.fixture
def slow_engine(engine: eSurge) -> eSurge:
    """The same with steps that take a while, so that a long request is surely under way when a test
    looks.
    """
    engine.engine.before_step = lambda _: time.sleep(0.01)
    return engine


@pytest.fixture
def make_real(engine_pool: EnginePool) -> Callable[..., AbstractContextManager[eSurge]]:
    """Serves by a real engine of the pool while a block lasts; two blocks one after the other may
    have the same.
    """

    @contextmanager
    def make(model: Any = BRIEF, **changes: Any) -> Iterator[eSurge]:
        with engine_pool.leases(), eSurge(model, **REAL | changes) as engine:
            if (REAL | changes).get("compile_runner", True):
                engine.run_on_engine(engine.engine.warmup)  # what is compiled in the background
            yield engine
            assert_idle(engine)

    return make


@pytest.fixture
def real_engine(make_real: Callable[..., AbstractContextManager[eSurge]]) -> Iterator[eSurge]:
    """All programs are compiled ahead, and none may be later; idle when a test is over."""
    with make_real() as engine:
        yield engine


@pytest.fixture
def slow_real_engine(real_engine: eSurge) -> Iterator[eSurge]:
    """The same, whose updates take a while."""
    slow = Slow()
    real_engine.audience.add(slow)
    yield real_engine
    real_engine.audience.remove(slow)
