"""Records that requests return: completions, outputs with their times, and chunks of a stream."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from enginebay.types import FinishReason


@dataclasses.dataclass(slots=True)
class RequestMetrics:
    """Times of one completion, in seconds of the monotonic clock, and counts of its tokens."""

    arrival_s: float = math.nan
    first_scheduled_s: float = math.nan
    first_token_s: float = math.nan
    finished_s: float = math.nan
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_draft_tokens: int = 0
    """Tokens that a proposer drafted and a step verified."""
    num_accepted_tokens: int = 0
    """Those of them that are in the output."""

    @property
    def time_to_first_token_s(self) -> float:
        """From submission to the first token."""
        return self.first_token_s - self.arrival_s

    @property
    def tokens_per_second(self) -> float:
        """Decode rate after the first token; nan for fewer than two tokens."""
        span = self.finished_s - self.first_token_s
        return (
            (self.num_generated_tokens - 1) / span
            if self.num_generated_tokens > 1 and span > 0
            else math.nan
        )


@dataclasses.dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt.

    `logprobs` has an entry for each of token_ids: log-probability by token id, best first, of that
    token and of the best ones asked for. They are log_softmax of the model's own logits, in nats.
    `cumulative_logprob` is the sum of those of token_ids. Both are None when the request did not
    ask for log-probabilities.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, float]] | None = None
    finish_reason: FinishReason | None = None


@dataclasses.dataclass(slots=True)
class RequestOutput:
    """A prompt and its completions, as `LLM.generate` returns it.

    `prompt_logprobs` has an entry for each of prompt_token_ids, as in CompletionOutput; of the
    first token, before which there is nothing, it is None. None when the request did not ask.
    `hidden`: the prompt's pooled hidden states f32 [hidden_size], of `LLM.embed` alone.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    metrics: RequestMetrics | None = None
    accumulated_text: str = ""
    delta_text: str = ""
    tokens_per_second: float = 0.0
    num_generated_tokens: int = 0
    time_spent_generating: float = 0.0
    first_token_time: float | None = None
    processing_time: float = 0.0
    update_seq: int = 0
    delta_seq: int = 0
    prompt_logprobs: list[dict[int, float] | None] | None = None
    hidden: np.ndarray | None = None

    def get_text(self) -> str:
        """The first completion's text, or "" when there is none."""
        return self.outputs[0].text if self.outputs else ""


@dataclasses.dataclass(frozen=True, slots=True)
class StreamChunk:
    """What `LLM.stream` yields: new text and tokens of one completion since the chunk before."""

    request_id: str
    index: int
    delta_text: str
    delta_token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    metrics: RequestMetrics | None = None
    logprobs: tuple[dict[int, float], ...] | None = None
    """Of delta_token_ids, as in CompletionOutput."""
    prompt_logprobs: tuple[dict[int, float] | None, ...] | None = None
    """As in RequestOutput, with the first chunk of the first completion."""
