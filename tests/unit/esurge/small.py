"""What the tests of eSurge share: one small size, questions that they ask an engine, and what a
fake one answers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from enginebay import SamplingParams
from enginebay.serving.observer import Ending, Execution, Observer, Update
from enginebay_esurge import RequestOutput, eSurge
from enginebay_paged.pool import PagePool
from tests.fakes import expected_tokens, make_request

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
REAL = OPTIONS | {"processors": ("guided",)}
"""Of the real engine, whose programs are fewer so: every other option is as documented."""
BUDGET = 144
"""max_model_len less the default reserve."""
WAIT_S = 60
PROMPT = "Once upon a time"
PROMPTS = [PROMPT, "The little fox", "A", "In the morning, the baker opened the shop and"]
GREEDY = SamplingParams(max_tokens=16)
GREEDY_ON = SamplingParams(max_tokens=16, ignore_eos=True)
HOT = SamplingParams(max_tokens=16, temperature=1.5, ignore_eos=True)
HOT_ON = SamplingParams(max_tokens=16, temperature=1.5, ignore_eos=True, seed=4)
"""For the real engine: greedily, the first layers of the demo model repeat themselves whatever they
are asked.
"""
LONG = SamplingParams(max_tokens=None, ignore_eos=True)


def with_(params: SamplingParams, **changes: Any) -> SamplingParams:
    """The same parameters but for these."""
    return SamplingParams(**(params.model_dump() | changes))


def token_ids(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """The first completion of each."""
    return [output.outputs[0].token_ids for output in outputs]


def foretold(output: RequestOutput, ends: tuple[int, ...] = ()) -> list[int]:
    """The tokens that a fake engine gives greedily for the prompt of an output, as many as it has
    unless one of `ends` comes.
    """
    prompt = np.asarray(output.prompt_token_ids, np.int32)
    num = output.num_generated_tokens
    return expected_tokens(
        make_request("", max_tokens=num, prompt_token_ids=prompt, stop_token_ids=ends)
    )


def until(condition: Callable[[], Any]) -> None:
    """Wait for it."""
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "waited for ever"
        time.sleep(0.002)


def thread_of(engine: eSurge) -> threading.Thread:
    """The thread that serves; this one when nothing runs."""
    thread: threading.Thread = engine.run_on_engine(threading.current_thread)
    return thread


def pool_of(engine: eSurge) -> PagePool:
    """The pages that requests of an eSurge hold."""
    pool: PagePool = engine.engine.ledger.groups["full"].store.pool
    return pool


def assert_idle(engine: eSurge) -> None:
    """Nothing is under way, and every page is free or kept for later. Aborts come before this in
    the engine's inbox.
    """
    inner = engine.engine
    engine.run_on_engine(inner.ledger.check)
    assert engine.run_on_engine(lambda: (inner.rows.num_reqs, pool_of(engine).num_used)) == (0, 0)
    assert (engine.num_pending_requests, engine.num_running_requests) == (0, 0)
    assert engine.get_metrics_summary().get("active_requests", 0) == 0


class Watcher(Observer):
    """An observer that ignores every event."""

    def updated(self, update: Update) -> None:
        pass

    def executed(self, execution: Execution) -> None:
        pass

    def ended(self, ending: Ending) -> None:
        pass


class Preemptions(Watcher):
    """For each update that preempted: how many tokens of its own every row had before it, at
    least.
    """

    def __init__(self, engine: eSurge) -> None:
        self.fewest: list[int] = []
        self._rows = engine.engine.rows
        self._before = 0
        engine.audience.add(self)

    def updated(self, update: Update) -> None:
        if update.num_preempted:
            self.fewest.append(self._before)
        taken = self._rows.taken_rows
        self._before = int((self._rows.num_tokens - self._rows.num_prompt_tokens)[taken].min())


class Slow(Watcher):
    """Lets every update of an engine take a while, so that a long request is surely under way when
    a test looks.
    """

    def updated(self, update: Update) -> None:
        time.sleep(0.01)
