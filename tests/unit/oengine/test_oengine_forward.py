"""Continuous batching after plans: ragged prompts, chunks, ends, too few pages, and threads that
enqueue.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from enginebay import SamplingParams
from enginebay_oengine import (
    InitialSequenceRequest,
    ModelIOProcessor,
    NextIterationPlan,
    OpenedModel,
    oEngine,
)
from enginebay_testing.near_ties import TOLERANCE, first_impossible_token
from enginebay_testing.reference import ReferenceModel
from tests.unit.oengine.dense import DenseModel, PagedReader
from tests.unit.oengine.small import CHUNK, GREEDY, NUM_SLOTS, PAGE_SIZE, iterate, serve

pytestmark = pytest.mark.xdist_group("oengine_api")

MAX_ERROR = 1e-5
"""Of keys and values in f32, as a share of the largest: they are computed in other shapes."""


def ragged(count: int, seed: int, **more: Any) -> list[InitialSequenceRequest]:
    """Random prompts of 1 to 80 tokens, some of whole pages or chunks, that ask for 1 to 20
    tokens.
    """
    rng = np.random.default_rng(seed)
    requests = []
    for i in range(count):
        length = int(
            rng.choice([1, PAGE_SIZE, CHUNK, CHUNK + 1, 2 * CHUNK, *rng.integers(1, 80, 5)])
        )
        prompt = rng.integers(10, 2000, length)
        max_tokens = int(rng.integers(1, 20))
        fields = {name: value(i) if callable(value) else value for name, value in more.items()}
        requests.append(InitialSequenceRequest(f"r{i}", prompt, max_tokens=max_tokens, **fields))
    return requests


@pytest.mark.long
def test_steps_of_every_kind_give_the_reference_models_tokens(
    engine: oEngine, reference: ReferenceModel
) -> None:  # holds O07
    requests, kinds = ragged(14, seed=1, ignore_eos=True), set[str]()
    tokens = serve(engine, requests, kinds)
    assert kinds >= {"prefill", "decode", "mixed"}
    for request in requests:
        assert len(tokens[request.id]) == request.max_tokens
        prompt = [int(t) for t in request.token_ids]
        assert reference.first_wrong_token(prompt, tokens[request.id], TOLERANCE) is None


@pytest.mark.long
def test_pages_hold_the_keys_and_values_of_a_dense_prefill(
    engine: oEngine, model: OpenedModel
) -> None:  # holds O07
    state, model_at_once, pages = engine.init_decode_state(), DenseModel(model), PagedReader(engine)
    for request in ragged(9, seed=3, ignore_eos=True):
        engine.scheduler.enqueue_prefill_request(request)
    checked = 0
    for number, (sampled, _) in enumerate(iterate(engine, state)):
        if number % 20 != 10 or sampled.finish_reason is not None:
            continue
        for slot, active in list(state.active_slot_requests_map.items()):
            request = active.request
            assert request is not None
            count = request.num_computed if not request.generated else active.length - 1
            if count:
                dense = model_at_once.keys_and_values(request.tokens()[:count])
                paged = pages.keys_and_values(engine, state, slot, count)
                assert np.abs(paged - dense).max() < MAX_ERROR * np.abs(dense).max()
                checked += 1
    assert checked >= 8


@pytest.mark.long
def test_tokens_are_those_of_llm(engine: oEngine, prompts: Any, oracle: Any) -> None:  # holds O07
    requests = [
        InitialSequenceRequest(str(i), prompt, max_tokens=24) for i, prompt in enumerate(prompts)
    ]
    tokens = serve(engine, requests)
    assert [tokens[str(i)] for i in range(4)] == [oracle(prompt, GREEDY) for prompt in prompts]


def test_each_row_has_its_own_sampling(
    engine: oEngine, reference: ReferenceModel
) -> None:  # holds O07
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.3, "top_k": 4},
        {"temperature": 0.8, "top_p": 0.6},
        {"temperature": 2.0, "top_k": 1},
    ]
    fields = {
        name: lambda i, name=name, default=default: kinds[i % 4].get(name, default)
        for name, default in (("temperature", 0.0), ("top_k", 0), ("top_p", 1.0))
    }
    requests = ragged(8, 2, ignore_eos=True, **fields)
    tokens = serve(engine, requests)
    for i, request in enumerate(requests):
        params = SamplingParams(seed=request.seed, **kinds[i % 4])
        prompt = [int(t) for t in request.token_ids]
        assert first_impossible_token(reference, prompt, tokens[request.id], params) is None


def test_too_few_pages_preempt_and_change_no_token(
    engine: oEngine, prompts: Any, oracle: Any, reference: ReferenceModel
) -> None:  # holds O07
    free = engine.manager.num_free_pages
    taken = engine.manager.alloc_hbm_pages(
        free - 10
    )  # three of the prompts alone, none of them to its end
    requests = [
        InitialSequenceRequest(str(i), prompts[3], max_tokens=60, ignore_eos=True) for i in range(6)
    ]
    kinds = set[str]()
    tokens = serve(engine, requests, kinds)
    engine.manager.free_hbm_pages(taken)
    assert any("preempting" in kind for kind in kinds)
    (whole,) = {tuple(tokens[request.id]) for request in requests}
    assert len(whole) == 60
    assert list(whole[:24]) == oracle(prompts[3], GREEDY)
    assert reference.first_wrong_token(prompts[3], whole, TOLERANCE) is None


def test_stop_tokens_end_a_request_and_free_its_slot_and_pages(
    engine: oEngine, prompts: Any, oracle: Any
) -> None:  # holds O07
    expected = oracle(prompts[0], GREEDY)
    at = next(i for i in range(3, 24) if expected[i] not in expected[:i])
    requests = [
        InitialSequenceRequest("first", prompts[0], stop_token_ids=(expected[0],)),
        InitialSequenceRequest("later", prompts[0], stop_token_ids=(expected[at],)),
        InitialSequenceRequest("length", prompts[0], max_tokens=1),
    ]
    state = engine.init_decode_state()
    for request in requests:
        engine.scheduler.enqueue_prefill_request(request)
    ends = {
        s.id: (s.finish_reason, s.position) for s, _ in iterate(engine, state) if s.finish_reason
    }
    start = len(prompts[0])
    assert ends == {
        "first": ("stop", start),
        "later": ("stop", start + at),
        "length": ("length", start),
    }
    assert not state.active_slot_requests_map
    assert (np.asarray(state.positions) == -1).all()
    assert not np.asarray(state.page_table).any()


def test_a_sequence_ends_where_the_engine_does(engine: oEngine) -> None:
    prompt = list(range(10, 10 + 150))
    tokens = serve(engine, [InitialSequenceRequest("a", prompt, max_tokens=1000, ignore_eos=True)])
    assert len(tokens["a"]) == 10


def test_plans_say_what_they_do(engine: oEngine, prompts: Any) -> None:  # holds O09
    state, scheduler = engine.init_decode_state(), engine.scheduler
    assert scheduler.create_plan(None, state) is None
    request = InitialSequenceRequest("a", prompts[3], max_tokens=14)
    scheduler.enqueue_prefill_request(request)

    def step(active: InitialSequenceRequest | None) -> tuple[NextIterationPlan, Any]:
        plan = scheduler.create_plan(active, state)
        assert plan is not None
        output = engine.forward(engine.graphstate, engine.graphothers, state, plan)
        return plan, ModelIOProcessor.prepare_model_output(output, plan, state, scheduler)

    plan, result = step(None)
    assert (plan.prefill_request, plan.schedule_prefill, plan.schedule_decodes) == (
        request,
        True,
        False,
    )
    assert plan.num_prefill_tokens == CHUNK
    pages = plan.prefill_pages_update
    assert pages is not None
    assert (pages.request_id, pages.slot, len(pages.page_indices)) == ("a", 0, -(-37 // PAGE_SIZE))
    assert 0 not in pages.page_indices
    assert result.tokens == ()
    assert result.active_prefill is request
    plan, result = step(result.active_prefill)
    assert (plan.num_prefill_tokens, plan.prefill_pages_update) == (4, None)
    assert [s.position for s in result.tokens] == [36]
    assert result.active_prefill is None
    plan, result = step(None)
    assert (plan.schedule_prefill, plan.schedule_decodes, plan.decode_slots) == (False, True, (0,))
    (task,) = plan.new_decodes_requests
    assert (task.id, task.slot, task.position, task.page_indices) == (
        "a",
        0,
        36,
        pages.page_indices,
    )
    assert plan.decodes_state_page_updates == ()
    updates = []
    while (plan := scheduler.create_plan(None, state)) is not None:
        updates += [(u.slot, u.page_idx) for u in plan.decodes_state_page_updates]
        assert len(plan.decodes_state_page_updates) <= 1, "a page is taken when it is written to"
        output = engine.forward(engine.graphstate, engine.graphothers, state, plan)
        ModelIOProcessor.prepare_model_output(output, plan, state, scheduler)
    assert updates == [(0, 3)]


def test_a_slot_can_be_freed_while_it_runs(engine: oEngine, prompts: Any) -> None:
    state = engine.init_decode_state()
    for i in range(2):
        engine.scheduler.enqueue_prefill_request(
            InitialSequenceRequest(str(i), prompts[i], max_tokens=9)
        )
    seen = []
    for sampled, _ in iterate(engine, state):
        seen.append(sampled.id)
        if seen.count("0") == 2 and sampled.id == "0":
            assert engine.free_resource(sampled.slot)
    assert seen.count("0") <= 3
    assert seen.count("1") == 9


def test_threads_enqueue_while_plans_are_made(
    engine: oEngine, prompts: Any, oracle: Any
) -> None:  # holds O09
    state, scheduler = engine.init_decode_state(), engine.scheduler
    total = 24

    def enqueue(number: int) -> None:
        for i in range(total // 4):
            which = (number + i) % 4
            scheduler.enqueue_prefill_request(
                InitialSequenceRequest(f"{which} {number} {i}", prompts[which], max_tokens=6)
            )

    threads = [threading.Thread(target=enqueue, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    tokens: dict[str, list[int]] = {}
    ended = 0
    while ended < total:
        assert scheduler.wait_for_work(30), "nothing was enqueued"
        for sampled, _ in iterate(engine, state):
            tokens.setdefault(sampled.id, []).append(sampled.token_id)
            ended += sampled.finish_reason is not None
    for thread in threads:
        thread.join()
    assert not scheduler.wait_for_work(0)
    assert all(some == oracle(prompts[int(name[0])], GREEDY)[:6] for name, some in tokens.items())


def test_wrong_requests_are_refused(engine: oEngine) -> None:
    wrong: list[dict[str, Any]] = [
        {"token_ids": []},
        {"token_ids": [[1, 2]]},
        {"token_ids": [0.5]},
        {"temperature": -1},
        {"max_tokens": 0},
        {"stop_token_ids": tuple(range(40))},
    ]
    for fields in wrong:
        with pytest.raises(ValueError, match="Allowed"):
            InitialSequenceRequest(**({"id": "a", "token_ids": [1]} | fields))
    scheduler = engine.scheduler
    for prompt, message in (([5] * 160, "at most 159"), ([9999], "token id 9999")):
        with pytest.raises(ValueError, match=message):
            scheduler.enqueue_prefill_request(InitialSequenceRequest("a", prompt))
    request = InitialSequenceRequest("a", [5], max_tokens=1)
    scheduler.enqueue_prefill_request(request)
    with pytest.raises(ValueError, match="a second time"):
        scheduler.enqueue_prefill_request(request)
    assert len(list(iterate(engine, engine.init_decode_state()))) == 1


def test_a_plan_of_another_state_is_refused(engine: oEngine) -> None:
    state = engine.init_decode_state()
    plan = NextIterationPlan(None, False, True, None, (), (), decode_slots=(NUM_SLOTS - 1,))
    with pytest.raises(ValueError, match="which is free"):
        engine.forward(engine.graphstate, engine.graphothers, state, plan)
