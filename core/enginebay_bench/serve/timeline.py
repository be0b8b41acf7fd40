"""The record of one request: when it was due, when it was sent, and when each chunk arrived."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Literal

TokenSource = Literal["usage", "tokenizer", "chunks"]
"""How the tokens of an answer were counted: by the server's `usage`, by a tokenizer here, or as one
per chunk.
"""


@dataclasses.dataclass(slots=True)
class RequestTimeline:
    """What happened to one request. All times are seconds of the event loop's clock.

    `due_s` is the time of the schedule, from which latencies count; `sent_s` is when the client
    began to send. They differ by the client's own lag.
    """

    index: int
    due_s: float
    sent_s: float = math.nan
    ended_s: float = math.nan
    chunk_s: list[float] = dataclasses.field(default_factory=list)
    """Arrival of each chunk that has text, reasoning or a tool call."""
    text: list[str] = dataclasses.field(default_factory=list)
    """The answer in pieces; kept only where a tokenizer counts tokens."""
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_tokens: int = 0
    token_source: TokenSource = "chunks"
    finish_reason: str | None = None
    error: str | None = None
    """Why the request failed; None when it was answered."""

    @property
    def lag_s(self) -> float:
        """Seconds between the scheduled time and the sending."""
        return self.sent_s - self.due_s

    @property
    def ttft_s(self) -> float:
        """Time to first token: from the scheduled time to the first chunk; NaN without a chunk."""
        return self.chunk_s[0] - self.due_s if self.chunk_s else math.nan

    @property
    def e2e_s(self) -> float:
        """From the scheduled time to the last chunk; NaN without a chunk."""
        return self.chunk_s[-1] - self.due_s if self.chunk_s else math.nan

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first; NaN with fewer than two tokens."""
        if self.num_tokens < 2 or not self.chunk_s:
            return math.nan
        return (self.chunk_s[-1] - self.chunk_s[0]) / (self.num_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Times between consecutive chunks, not divided by the tokens of a chunk."""
        times = self.chunk_s
        return [later - sooner for sooner, later in itertools.pairwise(times)]
