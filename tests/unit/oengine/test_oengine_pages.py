"""Pages of slots: what has ended or is let go gives them back, who has none waits or begins again,
and nothing is lost.
"""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import pytest

from enginebay_oengine import GenerationConfig, OpenedModel, OutOfPagesError, oEngine
from tests.unit.oengine.small import (
    GREEDY,
    NUM_SLOTS,
    PAGE_SIZE,
    PIECES,
    assert_nothing_is_held,
    decode,
    make_engine,
    prefill,
    token_at,
)

pytestmark = pytest.mark.xdist_group("oengine_api")


def test_many_more_requests_than_slots_leak_nothing(
    engine: oEngine, prompts: Any, oracle: Any
) -> None:  # holds O08
    state = engine.init_decode_state()
    waiting = [prompts[i % 4] for i in range(10 * NUM_SLOTS)]
    expected = [oracle(prompt, GREEDY)[: 2 + i % 3] for i, prompt in enumerate(prompts)]
    running: dict[int, tuple[int, list[int]]] = {}
    served = 0
    while waiting or running:
        while waiting and not state.available_slots.empty():
            slot = state.available_slots.get()
            which = (len(waiting) - 1) % 4
            prefix, token = prefill(engine, waiting.pop())
            engine.insert(prefix, state, slot)
            running[slot] = (which, [token])
        state, result = engine.decode(engine.graphstate, engine.graphothers, state)
        for slot, (which, tokens) in list(running.items()):
            tokens.append(token_at(result, slot))
            if len(tokens) == len(expected[which]):
                assert tokens == expected[which]
                assert engine.free_resource(slot)
                del running[slot]
                served += 1
    assert served == 10 * NUM_SLOTS
    del prefix
    assert_nothing_is_held(engine)


def test_a_sequence_ends_at_the_longest_length(engine: oEngine) -> None:
    state = engine.init_decode_state()
    longest = engine.metadata.max_length
    prefix, _ = prefill(engine, range(20, 20 + longest - 4))
    engine.insert(prefix, state, 0)
    assert len(decode(engine, state, [0], longest)[0]) == 3
    state, result = engine.decode(engine.graphstate, engine.graphothers, state)
    data = result.convert_to_numpy().get_result_at_slot(0)
    assert (bool(data.valid[0, 0]), int(data.tokens[0, 0])) == (False, engine.pad_token_id)
    assert engine.free_resource(0)


def test_a_sequence_ends_at_an_end_of_sequence(
    model: OpenedModel, prompts: Any, oracle: Any
) -> None:  # holds O08
    """With its first token, or with a later one; its pages are there for another one before its
    slot is freed.
    """
    long, short = oracle(prompts[3], GREEDY), oracle(prompts[0], GREEDY)
    at = next(i for i in range(5, 24) if long[i] not in long[:i])
    assert short[0] not in long[:at]
    ends = GenerationConfig([long[at], short[0]])
    engine = make_engine(dataclasses.replace(model, generation_config=ends))
    state = engine.init_decode_state()
    for slot, prompt, expected in ((2, prompts[3], long[: at + 1]), (1, prompts[0], short[:1])):
        prefix, first = prefill(engine, prompt)
        engine.insert(prefix, state, slot)
        assert [first, *decode(engine, state, [slot], 24)[slot]] == expected
    other = prompts[3][: PIECES[1]]
    prefix, first = prefill(engine, other)
    engine.insert(prefix, state, 0)
    prefix.release()
    taken = engine.manager.alloc_hbm_pages(engine.manager.num_free_pages)
    tokens = [first, *decode(engine, state, [0], 12)[0]]
    assert len(other) + len(tokens) > 2 * PAGE_SIZE + 1, "it needs a page more than its prompt"
    assert tokens == oracle(other, GREEDY)[: len(tokens)]
    engine.manager.free_hbm_pages(taken)
    assert [engine.free_resource(slot) for slot in (0, 1, 2)] == [True] * 3
    assert_nothing_is_held(engine)


@pytest.mark.parametrize(("num_left", "begins_again"), [(1, False), (0, True)])
def test_slots_without_pages_wait_or_begin_again_and_get_the_same_tokens(
    engine: oEngine, prompts: Any, oracle: Any, num_left: int, begins_again: bool
) -> None:  # holds O08
    state = engine.init_decode_state()
    first = []
    for slot in range(3):
        prefix, token = prefill(engine, prompts[3])
        engine.insert(prefix, state, slot)
        first.append(token)
        del prefix
    engine.decode(engine.graphstate, engine.graphothers, state)
    taken = engine.manager.alloc_hbm_pages(engine.manager.num_free_pages - num_left)
    expected = oracle(prompts[3], GREEDY)
    tokens: dict[int, list[int]] = {slot: [first[slot], expected[1]] for slot in range(3)}
    waited, preempted = 0, 0
    freed: set[int] = set()
    for _ in range(200):
        state, result = engine.decode(engine.graphstate, engine.graphothers, state)
        engine.manager.check()
        for slot in set(range(3)) - freed:
            token = token_at(result, slot)
            waited += token < 0
            preempted += state.active_slot_requests_map[slot].lease is None
            tokens[slot] += [token] if token >= 0 else []
            if len(tokens[slot]) >= len(expected):
                engine.free_resource(slot)
                freed.add(slot)
        if len(freed) == 3:
            break
    assert waited
    assert bool(preempted) == begins_again
    assert all(tokens[slot][: len(expected)] == expected for slot in range(3))
    engine.manager.free_hbm_pages(taken)


def test_too_few_pages_for_a_prompt_or_for_anybody_is_an_error_that_changes_nothing(
    engine: oEngine, prompts: Any
) -> None:
    state = engine.init_decode_state()
    prefix, _ = prefill(engine, prompts[0][:1] * PAGE_SIZE)
    engine.insert(prefix, state, 0)
    taken = engine.manager.alloc_hbm_pages(engine.manager.num_free_pages)
    with pytest.raises(OutOfPagesError, match="Free slots"):
        prefill(engine, prompts[0])
    with pytest.raises(OutOfPagesError, match="prefixes"):
        engine.decode(engine.graphstate, engine.graphothers, state)
    engine.manager.free_hbm_pages(taken)
    assert len(decode(engine, state, [0], 3)[0]) == 3


def test_garbage_collected_prefixes_release_their_pages(engine: oEngine, prompts: Any) -> None:
    before = engine.manager.num_free_pages
    prefix, _ = prefill(engine, prompts[3])
    engine.insert(prefix, engine.init_decode_state(), 0)
    assert engine.manager.num_free_pages < before
    engine.init_decode_state()
    del prefix
    gc.collect()
    assert engine.manager.num_free_pages == before
