"""What the tests of eSurge share: one small size, and questions that they ask an engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from enginebay import SamplingParams
from enginebay_esurge import RequestOutput, eSurge

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 160,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "page_size": 16,
    "sharding_axis_dims": (1, 1, 1, 1, 1),
    "decode_steps": 4,
    "engine_options": {"num_pages": 25},  # too few for four of the longest requests
}
BUDGET = 144
"""max_model_len less the default reserve."""
WAIT_S = 60
PROMPT = "Once upon a time"
PROMPTS = [PROMPT, "The little fox", "A", "In the morning, the baker opened the shop and"]
GREEDY = SamplingParams(max_tokens=16)
GREEDY_ON = SamplingParams(max_tokens=16, ignore_eos=True)
HOT = SamplingParams(max_tokens=16, temperature=1.5, ignore_eos=True)
LONG = SamplingParams(max_tokens=None, ignore_eos=True)


def with_(params: SamplingParams, **changes: Any) -> SamplingParams:
    """The same parameters but for these."""
    return SamplingParams(**(params.model_dump() | changes))


def token_ids(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """The first completion of each."""
    return [output.outputs[0].token_ids for output in outputs]


def until(condition: Callable[[], Any]) -> None:
    """Wait for it."""
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "waited for ever"
        time.sleep(0.002)


def assert_idle(engine: eSurge) -> None:
    """Nothing is under way, and every page is free or kept for later. Aborts come before this in the engine's inbox."""
    paged = engine._service.parts.engine
    engine._service.call(paged.ledger.check)
    assert engine._service.call(lambda: (paged.rows.num_reqs, paged.ledger.store.pool.num_used)) == (0, 0)
    assert (engine.num_pending_requests, engine.num_running_requests) == (0, 0)
    assert len(engine._serving.active) == 0
