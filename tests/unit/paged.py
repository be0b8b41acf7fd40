"""What tests of the serving loop on pages share: a tiny model, a pool that is too small, and requests that nothing ends early."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginebay.build.compose import Composed, build, make_plan
from enginebay.config import EngineConfig
from enginebay.engine import StepPlan
from enginebay.loop.loop import EngineLoop
from enginebay.loop.messages import Ticket, TokenEvent
from enginebay.registry import load_registry
from enginebay.scheduler import Scheduler
from enginebay.testing.tiny import write_tiny_checkpoint
from enginebay.types import FrozenSampling, Request

NUM_PAGES, PAGE_SIZE = 25, 8
DEADLOCK_S = 120
"""Long enough for any machine: a test that waits so long hangs."""


def make_parts(folder: Path, **options: Any) -> Composed:
    """The paged engine on a tiny model, with these of its options beside the sizes above."""
    sizes = {"page_size": PAGE_SIZE, "num_pages": NUM_PAGES}
    config = EngineConfig(
        model=str(write_tiny_checkpoint(folder, load_registry())),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        decode_steps=4,
        engine={"name": "oengine", **(sizes | options)},  # type: ignore[arg-type]
    )
    return build(make_plan(config))


class Loops:
    """Starts loops on one engine, one after the other."""

    def __init__(self, parts: Composed) -> None:
        self.parts = parts
        self._made: list[EngineLoop] = []

    def __call__(self, scheduler: Scheduler | None = None, **changes: Any) -> EngineLoop:
        """Starts one, with changes of the configuration; the one before must have been closed, or have nothing to do."""
        parts = self.parts
        config = parts.plan.config.model_copy(update=changes)
        self._made.append(EngineLoop(parts.engine, scheduler or parts.scheduler, config))
        return self._made[-1]

    def close(self) -> None:
        """End them, and look at the books."""
        for loop in self._made:
            loop.close()
            ledger: Any = loop.engine.ledger
            ledger.check()
            assert (ledger.store.pool.num_used, loop.engine.rows.num_reqs) == (0, 0)


def running(parts: Composed) -> Iterator[Loops]:
    """What a fixture of loops yields."""
    loops = Loops(parts)
    yield loops
    loops.close()


def request(name: str, length: int, max_tokens: int) -> Request:
    """A prompt that begins like others of its length's parity, never ended by a stop token."""
    prompt = np.random.default_rng(length % 2).integers(0, 96, length).astype(np.int32)
    sampling = FrozenSampling(max_tokens, 0.0, 0, 1.0, 0.0, (), (), False, True)
    return Request(name, prompt, sampling, (1, 2), time.monotonic())


def events(ticket: Ticket) -> list[TokenEvent]:
    """All events to the last, each within reason."""
    found = [ticket.get(DEADLOCK_S)]
    while found[-1].finish_reason is None:
        found.append(ticket.get(DEADLOCK_S))
    return found


def tokens(ticket: Ticket) -> list[int]:
    """All tokens of a request that ends as it should."""
    found = events(ticket)
    assert found[-1].error is None
    return [token for event in found for token in event.token_ids]


def all_tokens(tickets: Sequence[Ticket]) -> list[list[int]]:
    """The same of several."""
    return [tokens(ticket) for ticket in tickets]


def count_prefilled(engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each prefill step from now on."""
    counts: list[int] = []
    step = engine.step

    def counted(plan: StepPlan) -> Any:
        if not plan.is_decode:
            counts.append(sum(row.num_tokens for row in plan.rows))
        return step(plan)

    monkeypatch.setattr(engine, "step", counted)
    return counts
