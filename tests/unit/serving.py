"""What the tests of LLM, loop and program share: one small size, so that they compile the same few
programs.
"""

from __future__ import annotations

from typing import Any

import pytest

from enginebay import LLM, SamplingParams
from enginebay.serving.observer import Ending, Execution, Observer, Update

SIZES: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 160,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "decode_steps": 4,
}
SIZES_OF_APIS: dict[str, Any] = {n: x for n, x in SIZES.items() if n != "decode_steps"}
"""The same for an API that runs its steps itself, and refuses what only an LLM reads."""
DEADLOCK_S = 300
"""Long enough for any machine: a test that waits so long hangs."""

within_minutes = pytest.mark.timeout(240, func_only=True)
"""For a test of a second that would hang where its promise is broken."""

GREEDY = SamplingParams(max_tokens=16)
HOT = SamplingParams(max_tokens=16, temperature=1.5, ignore_eos=True)


def with_(params: SamplingParams, **changes: Any) -> SamplingParams:
    """The same parameters but for these."""
    return SamplingParams(**(params.model_dump() | changes))


def assert_idle(llm: LLM) -> None:
    """Every row is free. Aborts that tests cause come before these calls in the engine's inbox."""
    llm.run_on_engine(llm.engine.ledger.check)
    assert llm.run_on_engine(lambda: llm.engine.rows.num_reqs) == 0


def forbid_requests(llm: LLM, patch: pytest.MonkeyPatch) -> None:
    """Fail whoever queues a request from now on."""
    patch.setattr(llm.loop, "submit", lambda *_: pytest.fail("something was queued"))


class Endings(Observer):
    """Keeps the standing of every request that ended, in that order."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, str]] = []

    def updated(self, update: Update) -> None:
        pass

    def executed(self, execution: Execution) -> None:
        pass

    def ended(self, ending: Ending) -> None:
        self.seen.append((ending.request.priority, ending.request.tenant))
