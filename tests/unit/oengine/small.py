"""What the tests of the oEngine API share: one small model and size, and ways to drive an
engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from enginebay import SamplingParams
from enginebay_oengine import (
    ActiveSequenceBatch,
    HBMPageManager,
    InitialSequenceRequest,
    ModelIOProcessor,
    OpenedModel,
    PagedAttentionCache,
    ResultTokens,
    SampledToken,
    oEngine,
)
from tests.brief import LATE
from tests.unit import serving

MODEL: dict[str, Any] = {"model": LATE, "processors": ()} | serving.SIZES_OF_APIS
PAGE_SIZE = 16
NUM_PAGES = 41
NUM_SLOTS = 4
CHUNK = 32
SIZES: dict[str, Any] = {
    "max_concurrent_decodes": NUM_SLOTS,
    "max_concurrent_prefill": 2,
    "prefill_lengths": [CHUNK],
    "max_prefill_length": CHUNK,
    "max_length": 160,
}
GREEDY = SamplingParams(max_tokens=24)
HOT: dict[str, Any] = {"temperature": 1.2, "top_p": 0.9, "top_k": 40}
SEEDED = [SamplingParams(max_tokens=12, seed=seed, **HOT) for seed in (7, 2**40 + 3)]
PIECES = (20, 30)
"""The first so many tokens of the longest prompt are prompts too: more than a page, at most a
chunk.
"""


def make_engine(
    model: OpenedModel, num_pages: int = NUM_PAGES, page_size: int = PAGE_SIZE, **options: Any
) -> oEngine:
    """An engine of the small size with a cache of its own."""
    metadata = PagedAttentionCache.create_metadata(model, page_size=page_size, num_pages=num_pages)
    storage, manager = PagedAttentionCache.init_cache(metadata), HBMPageManager(metadata)
    return oEngine(model, None, storage, manager, **(SIZES | options))


def prefill(
    engine: oEngine, prompt: Sequence[int], seed: int = 0, **sampling: Any
) -> tuple[Any, int]:
    """The prefix of one prompt, padded to a chunk at least, and its first token."""
    tokens = np.zeros(max(CHUNK, len(prompt)), np.int32)
    tokens[: len(prompt)] = prompt
    valids = np.arange(len(tokens)) < len(prompt)
    prefix, result = engine.prefill(
        engine.graphstate,
        engine.graphothers,
        tokens,
        valids,
        len(prompt),
        **({"temperature": 0.0, "top_p": 1.0, "top_k": 0} | sampling),
        rngs=jax.random.PRNGKey(seed),
    )
    return prefix, token_at(result, 0)


def token_at(result: ResultTokens, slot: int) -> int:
    """The token of a slot; -1 when it has none."""
    data = result.convert_to_numpy().get_result_at_slot(slot)
    return int(data.tokens[0, 0]) if data.valid[0, 0] else -1


def decode(
    engine: oEngine, state: ActiveSequenceBatch, slots: Sequence[int], count: int
) -> dict[int, list[int]]:
    """Up to `count` tokens of each slot, by as many calls and as long as any has one."""
    tokens: dict[int, list[int]] = {slot: [] for slot in slots}
    while any(len(some) < count for some in tokens.values()):
        state, result = engine.decode(engine.graphstate, engine.graphothers, state, None)
        new = {slot: token_at(result, slot) for slot in slots}
        if all(token < 0 for token in new.values()):
            break
        for slot, token in new.items():
            tokens[slot] += [token] if token >= 0 else []
    return {slot: some[:count] for slot, some in tokens.items()}


def serve(
    engine: oEngine, requests: Sequence[InitialSequenceRequest], kinds: set[str] | None = None
) -> dict[str, list[int]]:
    """The tokens of requests by continuous batching; `kinds` gets what the steps were made of."""
    state = engine.init_decode_state()
    for request in requests:
        engine.scheduler.enqueue_prefill_request(request)
    tokens: dict[str, list[int]] = {request.id: [] for request in requests}
    for sampled, kind in iterate(engine, state):
        tokens[sampled.id].append(sampled.token_id)
        if kinds is not None:
            kinds.add(kind)
    assert state.available_slots.qsize() == engine.max_concurrent_decodes
    return tokens


def iterate(engine: oEngine, state: ActiveSequenceBatch) -> Any:
    """Every token that plans give, with the kind of the plan, until there is none to make."""
    active = None
    while (plan := engine.scheduler.create_plan(active, state)) is not None:
        output = engine.forward(engine.graphstate, engine.graphothers, state, plan)
        result = ModelIOProcessor.prepare_model_output(output, plan, state, engine.scheduler)
        kind = "mixed" if plan.schedule_prefill and plan.schedule_decodes else "one"
        kind = kind if kind == "mixed" else "prefill" if plan.schedule_prefill else "decode"
        kind += " preempting" if plan.preempted else ""
        sampled: SampledToken
        for sampled in result.tokens:
            yield sampled, kind
        active = result.active_prefill
        engine.manager.check()


def assert_nothing_is_held(engine: oEngine) -> None:
    """Every page is free."""
    engine.manager.check()
    assert engine.manager.num_free_pages == engine.metadata.num_pages - 1
