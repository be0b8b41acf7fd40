"""RequestOutput, and how it grows out of the events of a job's completions."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

from enginebay.llm.assemble import CompletionReader
from enginebay.llm.events import Event, RequestEnded
from enginebay.outputs import CompletionOutput
from enginebay.types import Request
from enginebay_esurge.jobs import Job


@dataclasses.dataclass(slots=True)
class RequestOutput:
    """A prompt and its completions, as far as they are.

    `accumulated_text` is the first completion's text, `delta_text` what was added to it since the
    update before; `num_generated_tokens` and `tokens_per_second` are of all completions. Times are
    in seconds: `first_token_time` since submission; `processing_time` with the time in the queue,
    `time_spent_generating` without. `tokens_per_second` is the rate after each completion's first
    token, 0.0 where there is none. `update_seq` rises with every update, `delta_seq` with every one
    that has delta_text. `prompt_logprobs` are there from the first token on, if they were asked
    for. `metrics` has what else is known; see `Assembly.output`.
    """

    request_id: str
    prompt: str | list[str]
    prompt_token_ids: list[list[int]] | list[int]
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
        """The first completion's text, or "" when there is none."""
        return self.outputs[0].text if self.outputs else ""

    def get_summary(self) -> dict[str, Any]:
        """The figures that are asked for most."""
        return {
            "request_id": self.request_id,
            "text": self.get_text(),
            "tokens_per_second": self.tokens_per_second,
            "num_generated_tokens": self.num_generated_tokens,
            "time_spent_generating": self.time_spent_generating,
            "finished": self.finished,
            "finish_reason": self.outputs[0].finish_reason if self.outputs else None,
        }


@dataclasses.dataclass(frozen=True, slots=True)
class Times:
    """When things happened to a job, by the monotonic clock; nan for what has not happened."""

    arrival_s: float
    first_scheduled_s: float
    first_token_s: float
    end_s: float

    def since_arrival(self, at_s: float) -> float:
        """Seconds from submission."""
        return at_s - self.arrival_s


class Assembly:
    """Puts the completions of one job together from their events. Belongs to the thread that reads."""

    def __init__(self, job: Job, readers: Sequence[CompletionReader]) -> None:
        self.job = job
        self.readers = readers
        self.done = False
        """Whether all completions have ended."""
        self._made = [_nothing_of(reader.request) for reader in readers]
        self._prompt_logprobs: list[dict[int, float] | None] | None = None
        self._shown = 0
        self._update_seq = 0
        self._delta_seq = 0

    @property
    def failed(self) -> bool:
        """Whether one of them ended otherwise than by itself."""
        return any(one.finish_reason not in ("stop", "length") for one in self._made)

    def take(self, event: Event) -> None:
        """Take in a chunk of a completion, or the end of the job. Raises its error."""
        if isinstance(event, RequestEnded):
            if event.error is not None:
                raise event.error
            self.done = True  # and the readers change no more
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
        """All so far, as the next update."""
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
        num_generated = sum(len(completion.token_ids) for completion in made)
        num_after_first = sum(max(0, len(completion.token_ids) - 1) for completion in made)
        times = self._times()
        span = times.end_s - times.first_token_s
        return RequestOutput(
            prepared.request_id,
            job.prompt,
            list(prepared.prompt_token_ids),
            completions,
            finished=self.done,
            metrics=self._metrics(times, num_generated),
            accumulated_text=text,
            delta_text=delta,
            tokens_per_second=num_after_first / span if num_after_first and span > 0 else 0.0,
            num_generated_tokens=num_generated,
            time_spent_generating=_or_zero(times.end_s - times.first_scheduled_s),
            first_token_time=_or_none(times.since_arrival(times.first_token_s)),
            processing_time=times.since_arrival(times.end_s),
            update_seq=self._update_seq,
            delta_seq=self._delta_seq,
            prompt_logprobs=self._prompt_logprobs,
        )

    def _metrics(self, times: Times, num_generated: int) -> dict[str, Any]:
        """Counts of tokens, what was made of the lengths asked for, and times in seconds."""
        job = self.job
        known = self.readers[0].progress
        each = [one.progress for one in self.readers if one.progress is not None]
        return {
            "prompt_tokens": job.lengths.num_prompt,
            "cached_tokens": 0 if known is None else known.num_cached_tokens,
            "generated_tokens": num_generated,
            "draft_tokens": sum(one.num_draft_tokens for one in each),
            "accepted_tokens": sum(one.num_accepted_tokens for one in each),
            "original_prompt_tokens": job.original_prompt_tokens,
            "tokens_dropped": job.original_prompt_tokens - job.lengths.num_prompt,
            "requested_new_tokens_original": job.requested_new_tokens,
            "requested_new_tokens_final": job.lengths.num_new,
            "queue_time": _or_none(times.since_arrival(times.first_scheduled_s)),
            "time_to_first_token": _or_none(times.since_arrival(times.first_token_s)),
        }

    def _times(self) -> Times:
        # Fields that are set once, before the event that brought them: the engine's thread changes
        # none of them later.
        known = [reader.progress for reader in self.readers if reader.progress is not None]
        ends = [reader.metrics.finished_s for reader in self.readers if reader.metrics is not None]
        return Times(
            arrival_s=self.readers[0].request.arrival_s,
            first_scheduled_s=_first(m.first_scheduled_s for m in known),
            first_token_s=_first(m.first_token_s for m in known),
            end_s=max(ends) if self.done and ends else time.monotonic(),
        )


def _nothing_of(request: Request) -> CompletionOutput:
    """A completion without tokens yet."""
    told = request.sampling.num_logprobs is not None
    return CompletionOutput(
        request.index,
        "",
        [],
        cumulative_logprob=0.0 if told else None,
        logprobs=[] if told else None,
    )


def _first(times: Any) -> float:
    return min((at_s for at_s in times if not math.isnan(at_s)), default=math.nan)


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value


def _or_zero(value: float) -> float:
    return 0.0 if math.isnan(value) else value
