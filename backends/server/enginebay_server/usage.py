"""Usage: counts the tokens of a request as they arrive."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

from enginebay.outputs import RequestMetrics, RequestOutput, StreamChunk


@dataclasses.dataclass(slots=True)
class Usage:
    """Prompt tokens, cached prompt tokens, and new tokens."""

    num_prompt: int = 0
    num_cached: int = 0
    num_new: int = 0
    since_s: float | None = None
    """The time of time.monotonic() when the request came, if its record has times."""
    first_s: float | None = None
    """The time of the first token, whose wait `tokens_per_second` leaves out."""
    num_first: int = 0
    """Number of new tokens that came at that time."""
    end_s: float | None = None
    """The time of the last token; None while more may come."""

    def add(self, chunk: StreamChunk) -> None:
        """Count the tokens of a chunk."""
        if chunk.delta_token_ids and self.first_s is None:
            self.first_s, self.num_first = time.monotonic(), len(chunk.delta_token_ids)
        self.num_new += len(chunk.delta_token_ids)
        if chunk.index == 0:
            self._add_cached(chunk.metrics)

    def add_output(self, output: RequestOutput) -> None:
        """Count the tokens of a whole output and of its prompt."""
        self.num_prompt += len(output.prompt_token_ids)
        self.num_new += output.num_generated_tokens
        self._add_cached(output.metrics)
        times = output.metrics
        if times is not None and output.num_generated_tokens:
            self.first_s = min(times.first_token_s, self.first_s or math.inf)
            self.end_s = max(times.finished_s, self.end_s or -math.inf)
            self.num_first += len(output.outputs)

    def _add_cached(self, metrics: RequestMetrics | None) -> None:
        """Add cached tokens. Only the metrics of a prompt's first completion count the prompt."""
        if metrics is not None:
            self.num_cached += metrics.num_cached_tokens

    @property
    def record(self) -> dict[str, Any]:
        """The field `usage` of OpenAI's answers."""
        record: dict[str, Any] = {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": self.num_new,
            "total_tokens": self.num_prompt + self.num_new,
            "prompt_tokens_details": {"cached_tokens": self.num_cached},
        }
        if self.since_s is not None:
            seconds = time.monotonic() - self.since_s
            record |= {"processing_time": seconds, "tokens_per_second": self.tokens_per_second}
        return record

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second after the first token; 0 for fewer than two tokens."""
        if self.first_s is None or self.num_new <= self.num_first:
            return 0.0
        end_s = time.monotonic() if self.end_s is None else self.end_s
        return (self.num_new - self.num_first) / max(end_s - self.first_s, 1e-9)
