"""The records that LLM returns: completions, outputs with metrics, and chunks of a stream."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from enginebay.html_table import html_table, html_text
from enginebay.types import FinishReason


@dataclasses.dataclass(slots=True)
class RequestMetrics:
    """Times of one completion, in seconds of the monotonic clock, and its token counts."""

    arrival_s: float = math.nan
    first_scheduled_s: float = math.nan
    first_token_s: float = math.nan
    finished_s: float = math.nan
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_draft_tokens: int = 0
    """Draft tokens of a proposer that a step verified."""
    num_accepted_tokens: int = 0
    """Draft tokens that were accepted and are in the output."""
    num_host_tokens: int = 0
    """Cached tokens whose pages were in the memory of the host."""
    num_disk_tokens: int = 0
    """Cached tokens whose pages were in files."""

    @property
    def time_to_first_token_s(self) -> float:
        """Seconds from arrival to the first token; nan before it."""
        return self.first_token_s - self.arrival_s

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second after the first token; nan for fewer than two tokens."""
        span = self.finished_s - self.first_token_s
        return (
            (self.num_generated_tokens - 1) / span
            if self.num_generated_tokens > 1 and span > 0
            else math.nan
        )


@dataclasses.dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt.

    `logprobs` has one dict for each of token_ids: token id -> log-probability, most likely first,
    for that token and for the top tokens that the request asked for. The values are in nats:
    log_softmax of the model's logits before penalties, processors and temperature.
    `cumulative_logprob` is the sum over token_ids. Both are None when the request did not ask for
    log-probabilities.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, float]] | None = None
    finish_reason: FinishReason | None = None


@dataclasses.dataclass(slots=True)
class RequestOutput:
    """A prompt and its completions, as `LLM.generate` returns them.

    `prompt_logprobs` has one entry for each of prompt_token_ids: a dict as in CompletionOutput, and
    None for the first token, which has no token before it. The list is None when the request did
    not ask for it. `hidden` holds the pooled hidden states f32 [hidden_size] that `LLM.embed`
    returns; it is None for other requests.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    metrics: RequestMetrics = dataclasses.field(default_factory=RequestMetrics)
    tokens_per_second: float = 0.0
    num_generated_tokens: int = 0
    prompt_logprobs: list[dict[int, float] | None] | None = None
    hidden: np.ndarray | None = None

    def get_text(self) -> str:
        """Return the text of the first completion, or "" when there is no completion."""
        return self.outputs[0].text if self.outputs else ""

    def _repr_html_(self) -> str:
        """Return what notebooks show: the prompt, and a row for each completion."""
        prompt = f"{len(self.prompt_token_ids)} tokens" if self.prompt is None else self.prompt
        rows = [
            (str(one.index), one.text, str(len(one.token_ids)), one.finish_reason or "")
            for one in self.outputs
        ]
        table = html_table(("", "text", "tokens", "ended by"), rows)
        return f"<p><b>{html_text(prompt)}</b></p>{table}"


@dataclasses.dataclass(frozen=True, slots=True)
class StreamChunk:
    """The text and tokens of one completion that are new since the last chunk of `LLM.stream`."""

    request_id: str
    index: int
    delta_text: str
    delta_token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    metrics: RequestMetrics | None = None
    logprobs: tuple[dict[int, float], ...] | None = None
    """One dict for each of delta_token_ids, as in CompletionOutput."""
    prompt_logprobs: tuple[dict[int, float] | None, ...] | None = None
    """As in RequestOutput. Only the first chunk of the first completion has it."""
