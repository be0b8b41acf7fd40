"""Scoring: the logits of every token of a sequence, and of its greedy continuation, out of an
engine's own steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from enginebay.engine import Engine, RowPlan, StepPlan
from enginebay.errors import RequestError, StoppedError, explain
from enginebay.llm import LLM
from enginebay.prefix_key import DIGEST_BYTES, PrefixKey
from enginebay.types import FrozenSampling, Request

REQUEST_ID = "scored"


@dataclasses.dataclass(frozen=True)
class Scored:
    """A sequence with what the engine made of it.

    logits f32 [tokens + new tokens - 1, vocab]: row i is what the model says of token i + 1, so
    that the rows from len(token_ids) - 1 on are those that the new tokens were chosen from, and all
    of these but the first were computed by decode steps.
    """

    token_ids: tuple[int, ...]
    new_token_ids: tuple[int, ...]
    logits: np.ndarray


class Scorer:
    """Scores sequences on an LLM's engine, one at a time, by chunked prefill and decode steps as in
    serving.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        config = llm.config
        assert config.max_model_len is not None, "make_plan settles max_model_len"
        self.max_model_len: int = config.max_model_len
        self._chunk = config.max_num_batched_tokens
        self._decode_steps = config.decode_steps

    def score(self, token_ids: Sequence[int], num_new: int = 1) -> Scored:
        """The logits of a sequence and of num_new tokens that follow it, greedily; both fit the
        context together.

        RequestError when they do not, or there are none. End-of-sequence tokens end nothing.
        """
        if not token_ids or num_new < 1 or len(token_ids) + num_new > self.max_model_len:
            raise RequestError(
                explain(
                    f"{len(token_ids)} tokens and {num_new} new ones to score",
                    f"at least one of each, {self.max_model_len} together",
                    "Score a shorter piece, or raise max_model_len.",
                )
            )
        scored: Scored = self._llm.run_on_engine(lambda: self._score(tuple(token_ids), num_new))
        return scored

    def _score(self, token_ids: tuple[int, ...], num_new: int) -> Scored:
        engine: Engine = self._llm.engine
        request = _greedy_request(token_ids, num_new)
        row = engine.rows.add_request(request)
        try:
            return self._run(engine, row, token_ids, num_new)
        finally:
            engine.rows.remove_request(REQUEST_ID)

    def _run(self, engine: Engine, row: int, token_ids: tuple[int, ...], num_new: int) -> Scored:
        total = len(token_ids) + num_new
        no_room = RequestError(
            explain(
                f"{total} tokens to score",
                "as many as the cache has room for",
                "Score a shorter piece.",
            )
        )
        # What is found in the cache would not be computed, so that nothing were known of it.
        key = PrefixKey(salt=secrets.token_hex(DIGEST_BYTES))
        lease = engine.ledger.admit(row, np.asarray(token_ids, np.int32), total, key)
        if lease is None:
            raise no_room

        def step(plan: RowPlan, num_steps: int = 0) -> tuple[list[int], np.ndarray]:
            if not engine.ledger.reserve(
                lease, plan.num_computed + max(plan.num_tokens, num_steps)
            ):
                raise no_room
            pending = engine.step(StepPlan((plan,), num_steps))
            new = [int(token) for token in pending.read()[0] if plan.samples and token >= 0]
            engine.rows.append_tokens(row, new)
            if any(engine.ledger.windows.values()):  # pages go back for what is committed
                num_computed = plan.num_computed + plan.num_tokens + max(0, len(new) - 1)
                engine.ledger.commit(lease, engine.rows.token_ids[row, :num_computed])
            return new, pending.read_logits()

        try:
            logits: list[np.ndarray] = []
            new: list[int] = []
            for start in range(0, len(token_ids), self._chunk):
                count = min(self._chunk, len(token_ids) - start)
                is_last = start + count == len(token_ids)
                new, found = step(RowPlan(row, lease, start, count, samples=is_last))
                logits.append(found[:count])
            while len(new) < num_new:
                steps = min(self._decode_steps, num_new - len(new))
                plan = RowPlan(row, lease, len(token_ids) + len(new) - 1, 1, samples=True)
                taken, found = step(plan, steps)
                logits.append(found[: len(taken)])
                new += taken
        finally:
            engine.ledger.release(lease)
        return Scored(token_ids, tuple(new), np.concatenate(logits))


@contextlib.contextmanager
def scoring(llm: LLM) -> Iterator[Scorer]:
    """While the block lasts, the engine's steps tell their logits, and nothing else may use it but
    the scorer.

    RequestError while requests run; UnsupportedError for an engine that cannot. Then nothing has
    changed.
    """
    engine: Engine = llm.engine

    def begin() -> tuple[Callable[[], None], bool]:
        if engine.rows.num_reqs:
            raise RequestError(
                explain(
                    f"{engine.rows.num_reqs} requests run while logits are to be told",
                    "none",
                    "Let them end, or end them, and try again.",
                )
            )
        undo = engine.swap(llm.plan.swapped, returns_logits=True)
        forbidden, engine.compilations.forbidden = engine.compilations.forbidden, False
        return undo, forbidden

    undo, forbidden = llm.run_on_engine(begin)

    def end() -> None:
        engine.compilations.forbidden = forbidden
        undo()

    try:
        yield Scorer(llm)
    finally:
        with contextlib.suppress(
            StoppedError
        ):  # closed within the block: there is nothing to go back to
            llm.run_on_engine(end)


def _greedy_request(token_ids: tuple[int, ...], num_new: int) -> Request:
    sampling = FrozenSampling(num_new)
    return Request(REQUEST_ID, np.asarray(token_ids, np.int32), sampling, (0, 0), 0.0)
