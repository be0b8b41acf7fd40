"""Scoring: the logits of every token of a sequence and of its greedy continuation, from an engine's
own steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from enginebay.contracts.engine import Engine, RowPlan, StepPlan
from enginebay.contracts.prefix_key import DIGEST_BYTES, PrefixKey
from enginebay.errors import RequestError, StoppedError, explain
from enginebay.serving import LLM
from enginebay.types import FrozenSampling, Request

REQUEST_ID = "scored"


@dataclasses.dataclass(frozen=True)
class Scored:
    """A sequence and the engine's results for it.

    logits f32 [tokens + new tokens - 1, vocab]: row i has the logits of token i + 1. The rows from
    len(token_ids) - 1 on are those of the new tokens; decode steps computed all of them except the
    first.
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
        assert config.max_model_len is not None, "a plan has a max_model_len"
        self.max_model_len: int = config.max_model_len
        self._chunk = config.max_num_batched_tokens
        self._decode_steps = config.decode_steps

    def score(self, token_ids: Sequence[int], num_new: int = 1) -> Scored:
        """Return the logits of a sequence and of num_new greedy tokens after it; together they must
        fit the context.

        RequestError when they do not fit, or the sequence is empty. End-of-sequence tokens do not
        end it.
        """
        if not token_ids or num_new < 1 or len(token_ids) + num_new > self.max_model_len:
            raise RequestError(
                explain(
                    f"{len(token_ids)} tokens and {num_new} new ones to score",
                    f"at least one of each, {self.max_model_len} in total",
                    "Score a shorter text, or raise max_model_len.",
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
                "Score a shorter text.",
            )
        )
        # A cached prefix would not be computed, so its logits would be missing.
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
            if any(
                engine.ledger.windows.values()
            ):  # frees the pages of committed tokens outside the window
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
    """Within the block, the engine's steps return their logits, and only the scorer may use the
    engine.

    RequestError while requests run; UnsupportedError for an engine that cannot return logits. Both
    leave the engine unchanged.
    """
    engine: Engine = llm.engine

    def begin() -> tuple[Callable[[], None], bool]:
        if engine.rows.num_reqs:
            raise RequestError(
                explain(
                    f"{engine.rows.num_reqs} requests run while logits are scored",
                    "none",
                    "Wait for the requests, or abort them, and try again.",
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
        ):  # closed within the block: no setting is left to restore
            llm.run_on_engine(end)


def _greedy_request(token_ids: tuple[int, ...], num_new: int) -> Request:
    sampling = FrozenSampling(num_new)
    return Request(REQUEST_ID, np.asarray(token_ids, np.int32), sampling, (0, 0), 0.0)
