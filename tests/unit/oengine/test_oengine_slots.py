"""Prefill, insert, decode and free: prefixes into slots, shared pages, parallel samples, and
nothing left behind.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from enginebay import SamplingParams
from enginebay_oengine import oEngine
from enginebay_testing.near_ties import TOLERANCE, first_impossible_token
from enginebay_testing.reference import ReferenceModel
from tests.unit.oengine.small import (
    CHUNK,
    GREEDY,
    HOT,
    NUM_SLOTS,
    PAGE_SIZE,
    SEEDED,
    decode,
    prefill,
    token_at,
)

pytestmark = pytest.mark.xdist_group("oengine_api")


def test_tokens_of_a_prompt_are_those_of_llm(
    engine: oEngine, prompts: Any, oracle: Any
) -> None:  # holds O08
    state = engine.init_decode_state()
    first = []
    for slot, prompt in enumerate(prompts):
        prefix, token = prefill(engine, prompt)
        assert engine.insert(prefix, state, slot) is state
        first.append(token)
    tokens = decode(engine, state, range(NUM_SLOTS), 23)
    for slot, prompt in enumerate(prompts):
        assert [first[slot], *tokens[slot]] == oracle(prompt, GREEDY)


def test_a_decode_state_takes_the_documented_arguments(engine: oEngine) -> None:
    state = engine.init_decode_state("anything", of="any name")
    assert engine.free_resource(0) is False
    assert set(state.active_slot_requests_map) == set(), "all slots are free"


def test_the_engine_names_where_its_arrays_are(engine: oEngine) -> None:
    for array, where in (
        (engine.graphstate, engine.graphstate_sharding),
        (engine.graphothers, engine.graphother_sharding),
        (engine.storage, engine.storage_sharding),
    ):
        leaves, shardings = jax.tree.leaves(array), jax.tree.leaves(where)
        assert [one.sharding for one in leaves] == shardings


def test_none_for_a_sampling_argument_is_its_default(
    engine: oEngine, prompts: Any, oracle: Any
) -> None:
    prefix, first = prefill(engine, prompts[0], temperature=None, top_p=None, top_k=None)
    prefix.release()
    assert first == oracle(prompts[0], GREEDY)[0]


def test_a_sampled_prompt_gets_what_llm_gives_its_seed(
    engine: oEngine, prompts: Any, oracle: Any
) -> None:
    for params in SEEDED:
        state = engine.init_decode_state()
        seed = params.seed or 0
        key = np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)
        prefix, result = engine.prefill(
            engine.graphstate,
            engine.graphothers,
            prompts[0],
            None,
            len(prompts[0]),
            *HOT.values(),
            key,
        )
        engine.insert(prefix, state, 2)
        tokens = [token_at(result, 0), *decode(engine, state, [2], 11)[2]]
        assert tokens == oracle(prompts[0], params)


def test_each_slot_has_its_own_sampling_and_neighbours_do_not_matter(
    engine: oEngine, prompts: Any, reference: ReferenceModel
) -> None:  # holds O08
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.5, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.5},
        {"temperature": 2.0, "top_k": 1},
    ]
    together, alone = {}, {}
    state = engine.init_decode_state()
    for slot, kind in enumerate(kinds):
        prefix, token = prefill(engine, prompts[slot], seed=slot, **kind)
        engine.insert(prefix, state, slot)
        together[slot] = [token]
    for slot, more in decode(engine, state, range(NUM_SLOTS), 9).items():
        together[slot] += more
    for slot, kind in enumerate(kinds):
        state = engine.init_decode_state()
        prefix, token = prefill(engine, prompts[slot], seed=slot, **kind)
        engine.insert(prefix, state, 3 - slot)
        alone[slot] = [token, *decode(engine, state, [3 - slot], 9)[3 - slot]]
        params = SamplingParams(seed=slot, **kind)
        assert first_impossible_token(reference, prompts[slot], alone[slot], params) is None
    assert together == alone


def test_padding_does_not_matter_and_long_prompts_are_processed_in_chunks(
    engine: oEngine, prompts: Any
) -> None:  # holds O08
    prompt = prompts[3]
    assert len(prompt) > CHUNK == engine.max_prefill_length
    rng = np.random.default_rng(0)
    results = []
    for before, after in ((0, 0), (5, 23), (30, 1)):
        tokens = rng.integers(0, 2000, before + len(prompt) + after)
        tokens[before : before + len(prompt)] = prompt
        valids = np.zeros(len(tokens), bool)
        valids[before : before + len(prompt)] = True
        prefix, result = engine.prefill(
            engine.graphstate, engine.graphothers, tokens, valids, len(prompt), 0.0, 1.0, 0
        )
        state = engine.init_decode_state()
        engine.insert(prefix, state, 0)
        results.append([token_at(result, 0), *decode(engine, state, [0], 5)[0]])
    assert results[0] == results[1] == results[2]


def test_a_prefill_takes_the_pages_of_its_prompt_and_no_more(
    engine: oEngine, prompts: Any, reference: ReferenceModel
) -> None:
    prompt = prompts[3]
    prefix, token = prefill(engine, prompt)
    assert reference.first_wrong_token(prompt, [token], TOLERANCE) is None
    assert engine.manager.num_free_pages == engine.metadata.num_pages - 1 - -(
        -len(prompt) // PAGE_SIZE
    )
    assert np.asarray(prefix.rows.token_ids)[0, : len(prompt) + 1].tolist() == [*prompt, token]


def prefill_two(engine: oEngine, prompts: Any) -> tuple[Any, Any]:
    """The prefix of two prompts, one of them longer than a chunk, and its result."""
    both = np.zeros((2, 40), np.int32)
    valids = np.zeros((2, 40), bool)
    for row, prompt in zip((0, 1), (prompts[3], prompts[0]), strict=True):
        both[row, : len(prompt)] = prompt
        valids[row, : len(prompt)] = True
    lengths = valids.sum(axis=1)
    return engine.prefill(
        engine.graphstate, engine.graphothers, both, valids, lengths, [0.0, 0.0], 1.0, 0
    )


@pytest.mark.long
def test_a_batch_of_prompts_goes_into_as_many_slots(
    engine: oEngine, prompts: Any, oracle: Any
) -> None:  # holds O08
    prefix, result = prefill_two(engine, prompts)
    state = engine.init_decode_state()
    engine.bulk_insert(prefix, state, [3, 1])
    tokens = decode(engine, state, [3, 1], 23)
    assert [token_at(result, 0), *tokens[3]] == oracle(prompts[3], GREEDY)
    assert [token_at(result, 1), *tokens[1]] == oracle(prompts[0], GREEDY)


def test_one_prefix_in_several_slots_shares_pages_until_they_are_written_to(
    engine: oEngine, prompts: Any
) -> None:  # holds O08
    prompt = prompts[3]  # two full pages and a part of one
    num_pages = -(-len(prompt) // PAGE_SIZE)
    before = engine.manager.num_free_pages
    prefix, first = prefill(engine, prompt, temperature=1.5)
    state = engine.init_decode_state()
    engine.bulk_insert(prefix, state, [0, 1, 2])
    assert before - engine.manager.num_free_pages == num_pages + 3, (
        "a copy of the last one for each slot"
    )
    assert np.asarray(state.token_ids).tolist() == [first, first, first, 0]
    assert np.asarray(state.positions).tolist() == [len(prompt)] * 3 + [-1]
    tokens = decode(engine, state, [0, 1, 2], 8)
    assert len({tuple(some) for some in tokens.values()}) == 3, (
        "completions are samples of their own"
    )
    table = np.asarray(state.page_table)
    assert (table[:3, : num_pages - 1] == table[0, : num_pages - 1]).all(), "full pages stay shared"
    assert len(set(table[:3, num_pages - 1])) == 3, "each slot writes to a copy of its own"
    assert before - engine.manager.num_free_pages == num_pages + 3, (
        "the prefix keeps its own last page"
    )
    engine.manager.check()
    # The prefix was not written to: a later copy of it is the next completion, and greedy ones do
    # not differ.
    engine.insert(prefix, state, 3)
    assert np.asarray(state.positions)[3] == len(prompt)


def test_parallel_samples_do_not_disturb_one_another(
    engine: oEngine, prompts: Any
) -> None:  # holds O08
    def tokens_of(slots: list[int]) -> list[list[int]]:
        prefix, _ = prefill(engine, prompts[3], seed=5, temperature=1.5)
        state = engine.init_decode_state()
        for slot in slots:
            engine.insert(prefix, state, slot)
        prefix.release()
        return list(decode(engine, state, slots, 12).values())

    found = tokens_of([0, 1, 2, 3])
    assert len(set(map(tuple, found))) == 4, "each copy is a sample of its own"
    assert found[:2] == tokens_of([2, 0])


def test_a_greedy_prefix_continues_alike_in_every_slot(
    engine: oEngine, prompts: Any, oracle: Any
) -> None:
    prefix, first = prefill(engine, prompts[3])
    state = engine.init_decode_state()
    engine.bulk_insert(prefix, state, [1, 3])
    start = decode(engine, state, [1, 3], 6)
    engine.insert(prefix, state, 0)  # while the others are on their way
    rest = decode(engine, state, [1, 3, 0], 17)
    expected = oracle(prompts[3], GREEDY)
    for slot in (1, 3):
        assert [first, *start[slot], *rest[slot]] == expected
    assert [first, *rest[0]] == expected[:18]


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([1], "occupied"),
        ([4], "0 to 3"),
        ([-1], "0 to 3"),
        ([2, 2], "different slots"),
        ([], "a slot for each"),
    ],
)
def test_wrong_slots_are_refused_and_change_nothing(
    engine: oEngine, prompts: Any, slots: list[int], message: str
) -> None:  # holds O08
    prefix, _ = prefill(engine, prompts[0])
    state = engine.init_decode_state()
    engine.insert(prefix, state, 1)
    free = engine.manager.num_free_pages
    with pytest.raises(ValueError, match=message):
        engine.bulk_insert(prefix, state, slots)
    assert list(state.active_slot_requests_map) == [1]
    assert (engine.manager.num_free_pages, state.available_slots.qsize()) == (free, 3)


@pytest.mark.long
def test_a_batch_needs_as_many_slots(engine: oEngine, prompts: Any) -> None:
    prefix, _ = prefill_two(engine, prompts)
    state = engine.init_decode_state()
    for slots in ([0], [0, 1, 2]):
        with pytest.raises(ValueError, match="for a prefix of 2 prompts"):
            engine.bulk_insert(prefix, state, slots)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": []}, "1 to"),
        ({"tokens": [[[1]]]}, "int \\[tokens\\]"),
        ({"tokens": [0.5]}, "int"),
        ({"tokens": [5000]}, "token id 5000"),
        ({"tokens": np.zeros((3, 4), np.int32), "true_length": 4}, "1 to 2 prompts"),
        ({"tokens": np.zeros(160, np.int32), "true_length": 160}, "1 to 159"),
        ({"true_length": 2, "valids": [True, True, True]}, "of the same shape as tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"temperature": [0.0, 1.0]}, "a number"),
        ({"rngs": np.zeros(3, np.uint32)}, "threefry"),
    ],
)
def test_wrong_prompts_are_refused(engine: oEngine, change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"tokens": [5, 6, 7], "valids": None, "true_length": 3}
    if "tokens" in change and "true_length" not in change:
        arguments["true_length"] = np.shape(change["tokens"])[-1]
    with pytest.raises(ValueError, match=message):
        engine.prefill(engine.graphstate, engine.graphothers, **(arguments | change))


def test_free_resource_frees_once_and_the_slot_can_be_used_again(
    engine: oEngine, prompts: Any
) -> None:  # holds O08
    before = engine.manager.num_free_pages
    state = engine.init_decode_state()
    prefix, _ = prefill(engine, prompts[3])
    engine.insert(prefix, state, 0)
    engine.decode(engine.graphstate, engine.graphothers, state)
    prefix.release()
    assert engine.free_resource(0) is True
    assert engine.free_resource(0) is False
    assert engine.free_resource(2) is False
    assert engine.manager.num_free_pages == before
    assert sorted(state.available_slots.get() for _ in range(NUM_SLOTS)) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="0 to 3"):
        engine.free_resource(NUM_SLOTS)


@pytest.mark.long
def test_a_key_for_a_step_changes_samples_and_greedy_ones_not(
    engine: oEngine, prompts: Any
) -> None:
    def run(temperature: float, seed: int | None) -> list[int]:
        state = engine.init_decode_state()
        prefix, _ = prefill(engine, prompts[0], temperature=temperature)
        engine.insert(prefix, state, 0)
        tokens = []
        for step in range(6):
            key = None if seed is None else jax.random.key(seed + step)
            state, result = engine.decode(engine.graphstate, engine.graphothers, state, key)
            tokens.append(token_at(result, 0))
        return tokens

    assert run(1.5, 3) == run(1.5, 3)
    assert len({tuple(run(1.5, seed)) for seed in (None, 3, 90)}) == 3
    assert run(0.0, 3) == run(0.0, None)


def test_result_tokens_are_one_array_that_is_copied_at_once(
    engine: oEngine, prompts: Any
) -> None:  # holds O08
    state = engine.init_decode_state()
    prefix, first = prefill(engine, prompts[0])
    engine.insert(prefix, state, 2)
    state, result = engine.decode(engine.graphstate, engine.graphothers, state)
    result.copy_to_host_async()
    host = result.convert_to_numpy()
    assert isinstance(host.data, np.ndarray)
    assert host.data.shape == (NUM_SLOTS, 3)
    host.copy_to_host_async()
    data = host.get_result_at_slot(2)
    assert (data.tokens.shape, data.valid.shape, data.lengths.shape) == ((1, 1), (1, 1), (1,))
    assert (bool(data.valid[0, 0]), int(data.lengths[0])) == (True, 2)
    assert int(data.tokens[0, 0]) == int(state.token_ids[2]) != first
    free = host.get_result_at_slot(0)
    assert (bool(free.valid[0, 0]), int(free.tokens[0, 0])) == (False, engine.pad_token_id)
    with pytest.raises(ValueError, match="0 to 3"):
        host.get_result_at_slot(4)
