"""Conformance checks of engines: a row that is taken out of one and put into another."""

from __future__ import annotations

import functools

import numpy as np

from enginebay.engine import Engine, RowState
from enginebay.types import SamplingParams
from enginebay_testing.driver import RequestDriver, request_of
from enginebay_testing.subject import EngineSubject, greedy, penalised, prompts_of, seeded


def state_moves_to_another_engine(subject: EngineSubject) -> None:
    """Taken out and put into another row of another engine, a request has the same tokens."""
    prompt = prompts_of(subject.vocab_size, (21,), seed=5)[0]
    with subject.shared() as first, subject.make() as second:
        for params in (greedy(12), seeded(12), penalised(12)):
            begin = functools.partial(_begin_and_take, first.engine, prompt, params)
            state, before, after = first.run_on_engine(begin)
            assert state.constants == first.plan.model.info.constants, (
                "RowState.constants are not those of the model"
            )
            go_on = functools.partial(_put_and_go_on, second.engine, prompt, params, state, before)
            assert second.run_on_engine(go_on) == after, "a moved request goes on differently"


def _begin_and_take(
    engine: Engine, prompt: list[int], params: SamplingParams
) -> tuple[RowState, list[int], list[int]]:
    """A request's state after four tokens, those tokens, and the eight after them."""
    driver = RequestDriver(engine, request_of(prompt, params))
    before = driver.prefill() + driver.decode(3)
    state = engine.take(driver.lease)
    after = driver.decode(4) + driver.decode(4)
    driver.close()
    return state, before, after


def _put_and_go_on(
    engine: Engine, prompt: list[int], params: SamplingParams, state: RowState, before: list[int]
) -> list[int]:
    """Eight tokens after a state, in a row that is not the one it came from."""
    other = RequestDriver(engine, request_of(prompt[::-1], params, "in the way"))
    driver = RequestDriver(engine, request_of(prompt, params))
    engine.put(driver.lease, state)
    again = engine.take(driver.lease)
    for group, held in state.groups.items():
        found = again.groups[group]
        assert found.first == held.first, f"group {group!r} is taken from {found.first} on"
        for name, array in held.arrays.items():
            assert np.array_equal(found.arrays[name], array), (
                f"{name} of group {group!r}: what was put in is not what is taken out again"
            )
    driver.resume(before)
    tokens = driver.decode(4) + driver.decode(4)
    driver.close()
    other.close()
    return tokens
