"""RequestOutput, and its assembly from the events of a job's completions."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

from enginebay.outputs import CompletionOutput
from enginebay.serving.assemble import CompletionReader
from enginebay.serving.events import Event, RequestEnded
from enginebay.types import Request
from enginebay_esurge.jobs import Job


@dataclasses.dataclass(slots=True)
class RequestOutput:
    """A prompt and its completions so far.

    `accumulated_text` is the first completion's text, and `delta_text` its addition since the last
    update. `num_generated_tokens` and `tokens_per_second` count all completions. Times are in
    seconds: `first_token_time` since submission; `processing_time` includes the time in the queue,
    `time_spent_generating` does not. `tokens_per_second` is the rate after each completion's first
    token, or 0.0. `update_seq` increases with every update, `delta_seq` with every update that has
    delta_text. `prompt_logprobs`, if requested, come with the first token. `metrics` has further
    figures, see `Assembly.output`.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    metrics: dict[str, Any] | None = None
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

    def get_text(self) -> str:
        """Return the text of the first completion, or "" when there is no completion."""
        return self.outputs[0].text if self.outputs else ""

    def get_summary(self) -> dict[str, Any]:
        """Return the most important fields as a dict."""
        return {
            "request_id": self.request_id,
            "text": self.get_text(),
            "tokens_per_second": self.tokens_per_second,
            "num_generated_tokens": self.num_generated_tokens,
            "time_spent_generating": self.time_spent_generating,
            "finished": self.finished,
            "finish_reason": self.outputs[0].finish_reason if self.outputs else None,
        }


class Assembly:
    """Assembles the completions of one job from their events. Belongs to the reader's thread."""

    def __init__(self, job: Job, readers: Sequence[CompletionReader]) -> None:
        self.job = job
        self.readers = readers
        self.done = False
        """Whether all completions have ended."""
        self._made = [_empty_completion(reader.request) for reader in readers]
        self._prompt_logprobs: list[dict[int, float] | None] | None = None
        self._shown = 0
        self._update_seq = 0
        self._delta_seq = 0

    @property
    def failed(self) -> bool:
        """Whether a completion ended with another reason than "stop" or "length"."""
        return any(one.finish_reason not in ("stop", "length") for one in self._made)

    def take(self, event: Event) -> None:
        """Add a chunk of a completion, or the end of the job. Raises the job's error."""
        if isinstance(event, RequestEnded):
            if event.error is not None:
                raise event.error
            self.done = True  # the readers do not change any more
            self._made = [reader.completion() for reader in self.readers]
            self._prompt_logprobs = self.readers[0].prompt_logprobs
            return
        if event.prompt_logprobs is not None:
            self._prompt_logprobs = list(event.prompt_logprobs)
        made = self._made[event.index]
        made.text += event.delta_text
        made.token_ids += event.delta_token_ids
        made.finish_reason = event.finish_reason
        if event.logprobs is not None and made.logprobs is not None:
            made.logprobs += event.logprobs
            each = zip(event.delta_token_ids, event.logprobs, strict=True)
            made.cumulative_logprob = sum(
                (one[t] for t, one in each), made.cumulative_logprob or 0.0
            )

    def output(self) -> RequestOutput:
        """Return everything so far, as the next update."""
        job, prepared = self.job, self.job.prepared
        made = [
            dataclasses.replace(
                one,
                token_ids=list(one.token_ids),
                logprobs=None if one.logprobs is None else [*one.logprobs],
            )
            for one in self._made
        ]
        completions = made if prepared.choice is None else prepared.choice.returned(made)
        text = completions[0].text
        delta, self._shown = text[self._shown :], len(text)
        self._update_seq += 1
        self._delta_seq += bool(delta)
        num_after_first = sum(max(0, len(completion.token_ids) - 1) for completion in made)
        # The engine's thread sets these fields once, before their event, and never changes them.
        known = [reader.progress for reader in self.readers if reader.progress is not None]
        ends = [reader.metrics.finished_s for reader in self.readers if reader.metrics is not None]
        arrival_s = self.readers[0].request.arrival_s
        scheduled_s = _first(one.first_scheduled_s for one in known)
        first_token_s = _first(one.first_token_s for one in known)
        end_s = max(ends) if self.done and ends else time.monotonic()
        span_s = end_s - first_token_s
        figures: dict[str, Any] = {
            "generated_tokens": sum(len(completion.token_ids) for completion in made),
            "draft_tokens": sum(one.num_draft_tokens for one in known),
            "accepted_tokens": sum(one.num_accepted_tokens for one in known),
            "queue_time": _or_none(scheduled_s - arrival_s),
            "time_to_first_token": _or_none(first_token_s - arrival_s),
        }
        return RequestOutput(
            prepared.request_id,
            job.prompt,
            list(prepared.prompt_token_ids),
            completions,
            finished=self.done,
            metrics=figures | self._lengths(),
            accumulated_text=text,
            delta_text=delta,
            tokens_per_second=num_after_first / span_s if num_after_first and span_s > 0 else 0.0,
            num_generated_tokens=figures["generated_tokens"],
            time_spent_generating=_or_none(end_s - scheduled_s) or 0.0,
            first_token_time=figures["time_to_first_token"],
            processing_time=end_s - arrival_s,
            update_seq=self._update_seq,
            delta_seq=self._delta_seq,
            prompt_logprobs=self._prompt_logprobs,
        )

    def _lengths(self) -> dict[str, Any]:
        """Tokens of the prompt, and requested and final lengths."""
        job, first = self.job, self.readers[0].progress
        return {
            "prompt_tokens": job.lengths.num_prompt,
            "cached_tokens": 0 if first is None else first.num_cached_tokens,
            "cached_tokens_on_host": 0 if first is None else first.num_host_tokens,
            "cached_tokens_on_disk": 0 if first is None else first.num_disk_tokens,
            "original_prompt_tokens": job.original_prompt_tokens,
            "tokens_dropped": job.original_prompt_tokens - job.lengths.num_prompt,
            "requested_new_tokens_original": job.requested_new_tokens,
            "requested_new_tokens_final": job.lengths.num_new,
        }


def _empty_completion(request: Request) -> CompletionOutput:
    """A completion without tokens."""
    has_logprobs = request.sampling.num_logprobs is not None
    return CompletionOutput(
        request.index,
        "",
        [],
        cumulative_logprob=0.0 if has_logprobs else None,
        logprobs=[] if has_logprobs else None,
    )


def _first(times: Any) -> float:
    return min((at_s for at_s in times if not math.isnan(at_s)), default=math.nan)


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value
