"""Engines in the state in which a server becomes ready: they have the first programs, with which
every step can run, and no others come.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import pytest

from enginebay.contracts.engine import Pending, StepPlan
from enginebay_runtime.engine import StepEngine


@contextlib.contextmanager
def first_programs() -> Iterator[list[str]]:
    """Within the block, an engine compiles the first programs at its first step, as a server does,
    unless a test has compiled all. The list has the titles of those that did.
    """
    usual, begun, titles = StepEngine.step, weakref.WeakSet[StepEngine](), list[str]()

    def step(engine: StepEngine, plan: StepPlan) -> Pending:
        if engine not in begun:
            engine.begin_warmup()  # what it returns is never started
            begun.add(engine)
            titles.append(engine.parts.title)
        return usual(engine, plan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepEngine, "step", step)
        yield titles
