"""RequestDriver runs one request on an engine directly, without loop and scheduler."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from enginebay.contracts.engine import Engine, RowPlan, StepPlan
from enginebay.contracts.prefix_key import PrefixKey
from enginebay.types import FrozenSampling, Request, SamplingParams


@dataclasses.dataclass
class RequestDriver:
    """Runs one request on an engine. Call it on the engine's thread."""

    engine: Engine
    request: Request

    def __post_init__(self) -> None:
        self.row = self.engine.rows.add_request(self.request)
        total = len(self.request.prompt_token_ids) + self.request.sampling.max_tokens
        key = PrefixKey(self.engine.weights_version)
        lease = self.engine.ledger.admit(self.row, self.request.prompt_token_ids, total, key)
        assert lease is not None, "an empty engine refuses a short request"
        self.lease = lease
        self.num_computed = lease.num_cached
        self._total = total
        self._reserve(lease.num_cached)

    def prefill(self, end: int | None = None) -> list[int]:
        """Prefill the row's tokens from num_computed up to `end` (None: all). Return the new
        tokens: one if the last token was reached, else none.
        """
        start, total = self.num_computed, int(self.engine.rows.num_tokens[self.row])
        self.num_computed = end = total if end is None else end
        self._reserve(start)
        row = RowPlan(self.row, self.lease, start, end - start, samples=end == total)
        return self._commit(self.engine.step(StepPlan((row,))).read()[0])

    def decode(self, num_steps: int) -> list[int]:
        """Decode and return up to num_steps more tokens."""
        cached = int(self.engine.rows.num_tokens[self.row]) - 1
        self._reserve(cached)
        plan = StepPlan((RowPlan(self.row, self.lease, cached, 1, samples=True),), num_steps)
        return self._commit(self.engine.step(plan).read()[0])

    def resume(self, token_ids: Sequence[int]) -> None:
        """Append tokens that were generated before, by this engine or another one."""
        self.engine.rows.append_tokens(self.row, token_ids)

    def close(self) -> None:
        """Release the row and its lease."""
        self.engine.ledger.release(self.lease)
        self.engine.rows.remove_request(self.request.request_id)

    def _reserve(self, num_computed: int) -> None:
        ledger = self.engine.ledger
        ledger.resume(self.lease, num_computed)
        assert ledger.reserve(self.lease, self._total), (
            "an empty engine has no room for a short request"
        )

    def _commit(self, tokens: np.ndarray) -> list[int]:
        new = [int(t) for t in tokens if t >= 0]
        self.engine.rows.append_tokens(self.row, new)
        return new


def request_of(prompt: list[int], params: SamplingParams, request_id: str = "driven") -> Request:
    """Make a request without stop tokens."""
    assert params.max_tokens is not None, "a driven request needs max_tokens"
    sampling = FrozenSampling(params.max_tokens, params, num_logprobs=params.logprobs)
    return Request(request_id, np.asarray(prompt, np.int32), sampling, (0, params.seed or 0), 0.0)
