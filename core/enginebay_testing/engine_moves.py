"""Conformance checks of engines: a row is taken out of one engine and put into another."""

from __future__ import annotations

import functools
import unittest
from collections.abc import Sequence

import numpy as np

from enginebay.contracts.cache import KVLayout, Lease
from enginebay.contracts.cache_shape import pages_for
from enginebay.contracts.commands import PageOut
from enginebay.contracts.engine import Engine, RowState
from enginebay.errors import UnsupportedError
from enginebay.serving import LLM
from enginebay.types import SamplingParams
from enginebay_runtime.engine import StepEngine
from enginebay_testing.driver import RequestDriver, request_of
from enginebay_testing.subject import EngineSubject, greedy, penalty_params, random_prompts, seeded

MID_PROMPT = 16
"""Tokens in the first chunk of a prompt, after which the row is moved."""


def state_moves_to_another_engine(subject: EngineSubject) -> None:
    """A request gets the same tokens after it moves to another row of another engine, in the middle
    of its prompt or of its output.
    """
    prompt = random_prompts(subject.vocab_size, (21,), seed=5)[0]
    cases = (*dict.fromkeys((greedy, seeded, penalty_params)).items(), (penalty_params, MID_PROMPT))
    with subject.shared() as first, subject.make() as second:
        moves_between(first, second, prompt, [(params(12), end) for params, end in cases])


def moves_between(
    first: LLM, second: LLM, prompt: list[int], cases: Sequence[tuple[SamplingParams, int | None]]
) -> None:
    """Check `state_moves_to_another_engine` for two engines and a prompt whose parameters give 12
    tokens. The row moves after `end` tokens of the prompt; None: after four new tokens.
    """
    for params, end in cases:
        begin = functools.partial(_begin_and_take, first.engine, prompt, params, end)
        state, before, after = first.run_on_engine(begin)
        assert state.constants == first.plan.model.info.constants, (
            "RowState.constants differ from the model's constants"
        )
        go_on = functools.partial(_put_and_go_on, second.engine, prompt, params, state, before)
        assert second.run_on_engine(go_on) == after, (
            "a moved request continues with different tokens"
        )


def _begin_and_take(
    engine: Engine, prompt: list[int], params: SamplingParams, end: int | None
) -> tuple[RowState, list[int], list[int]]:
    """Run four tokens, or `end` tokens of the prompt, then take the row. Return its state, the
    tokens before and the tokens after.
    """
    driver = RequestDriver(engine, request_of(prompt, params))
    before = driver.prefill(end) + (driver.decode(3) if end is None else [])
    state = engine.take(driver.lease)
    wanted = len(prompt) + 3 if end is None else end
    assert state.num_cached == wanted, (
        f"{wanted} tokens are in the cache, the state of the taken row has {state.num_cached}"
    )
    after = [] if end is None else driver.prefill()
    after += driver.decode(4) + driver.decode(4)
    driver.close()
    return state, before, after


def _put_and_go_on(
    engine: Engine, prompt: list[int], params: SamplingParams, state: RowState, before: list[int]
) -> list[int]:
    """Return the tokens after a state, continued in another row than the original one."""
    other = RequestDriver(engine, request_of(prompt[::-1], params, "in the way"))
    driver = RequestDriver(engine, request_of(prompt, params))
    engine.put(driver.lease, state)
    again = engine.take(driver.lease)
    assert again.num_cached == state.num_cached, (
        f"put() got {state.num_cached} tokens, take() then returns {again.num_cached}"
    )
    for group, held in state.groups.items():
        found = again.groups[group]
        assert found.first == held.first, (
            f"group {group!r} starts at {found.first}, expected {held.first}"
        )
        for name, array in held.arrays.items():
            assert np.array_equal(found.arrays[name], array), (
                f"{name} of group {group!r}: take() after put() returns other values"
            )
    driver.resume(before)
    driver.num_computed = state.num_cached
    tokens = [] if before else driver.prefill()
    tokens += driver.decode(4) + driver.decode(4)
    driver.close()
    other.close()
    return tokens


def put_restores_the_bytes(subject: EngineSubject, layout: str | None = None) -> None:
    """`put` after `take` leaves the same bytes in every cache array, in the pages of another row.
    `layout` names the cache layout; None means the subject's own.
    """
    prompt = random_prompts(subject.vocab_size, (21,), seed=5)[0]
    if layout is None:
        with subject.shared() as llm:
            for end in (None, MID_PROMPT):
                llm.run_on_engine(functools.partial(put_and_compare, llm.engine, prompt, end))
        return
    try:
        llm = subject.make(layout=layout)
    except UnsupportedError as error:
        raise unittest.SkipTest(str(error)) from None
    with llm:
        if isinstance(llm.engine, StepEngine):
            assert {one.name for one in llm.engine.layouts.values()} == {layout}
        llm.run_on_engine(functools.partial(put_and_compare, llm.engine, prompt))


def put_and_compare(engine: Engine, prompt: list[int], end: int | None = None) -> None:
    """Check `put_restores_the_bytes` on an engine's thread: take a row after `end` tokens of its
    prompt (None: after its first four new tokens).
    """
    if not isinstance(engine, StepEngine):
        raise unittest.SkipTest("bytes of pages are only readable in an engine that runs commands")
    engine.drop_arrays()  # a prefix of the prompt may be cached, beyond `end`
    engine.make_arrays()
    driver = RequestDriver(engine, request_of(prompt, greedy(12)))
    driver.prefill(end)
    if end is None:
        driver.decode(3)
    state = engine.take(driver.lease)
    before = _stored(engine, driver.lease, state)
    driver.close()
    engine.drop_arrays()
    engine.make_arrays()
    other = RequestDriver(engine, request_of(prompt[::-1], greedy(12), "in the way"))
    driver = RequestDriver(engine, request_of(prompt, greedy(12)))
    engine.put(driver.lease, state)
    engine.take(driver.lease)  # completes the copies that `put` has queued
    after = _stored(engine, driver.lease, state)
    driver.close()
    other.close()
    assert set(before) == set(after), "put() after take() changed the names of the arrays"
    for name, array in before.items():
        assert array.any(), f"{name} of the cache is all zeros for a row of {len(prompt)} tokens"
        assert array.tobytes() == after[name].tobytes(), (
            f"{name} of the cache: put() after take() changed the bytes of the row"
        )


def _stored(engine: StepEngine, lease: Lease, state: RowState) -> dict[str, np.ndarray]:
    """Return what the device stores of a row's cached tokens, by "group/layer/array"."""
    stored = {}
    for group, layout in engine.layouts.items():
        table = np.zeros((1, pages_for(lease.capacity, layout.page_size)), np.int32)
        engine.ledger.write_table(group, [lease], table)
        for name, found in engine.executor.run(PageOut({group: table[0]})).items():
            array = np.asarray(found)
            stored[name] = array[0]
            if isinstance(layout, KVLayout):
                by_token = np.moveaxis(array, layout.offset_axis_of(name.rpartition("/")[2]), 1)
                by_token = by_token.reshape(-1, *by_token.shape[2:])
                stored[name] = by_token[state.groups[group].first : state.num_cached]
    return stored
