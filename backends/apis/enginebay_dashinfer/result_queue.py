"""ResultQueue: the tokens of one request as they are generated, and how far the request is."""

from __future__ import annotations

import dataclasses
import math
import numbers
import threading
import time
from typing import Any

from enginebay.errors import EnginebayError, InternalError, RequestError, shown
from enginebay.outputs import RequestMetrics, StreamChunk
from enginebay.serving.assemble import CompletionReader
from enginebay.serving.events import Event, RequestEnded
from enginebay_dashinfer.statuses import GenerateRequestStatus

LogProb = tuple[int, float]
"""A token id and its log-probability in nats."""


@dataclasses.dataclass(slots=True)
class GeneratedElements:
    """The tokens that were generated since the call before.

    log_probs_list has for each token the most likely tokens, as many as `top_logprobs` asked for;
    token_logprobs_list has the log-probability of the token itself. Both are empty without
    `logprobs`. tensors_from_model_inference is empty: no model of this engine returns tensors.
    prefix_cache_len is the number of prompt tokens that were in the cache: prefix_len_gpu of them
    on the device, and prefix_len_cpu in the memory of the host.
    """

    ids_from_generate: list[int] = dataclasses.field(default_factory=list)
    log_probs_list: list[list[LogProb]] = dataclasses.field(default_factory=list)
    token_logprobs_list: list[float] = dataclasses.field(default_factory=list)
    tensors_from_model_inference: dict[str, Any] = dataclasses.field(default_factory=dict)
    prefix_cache_len: int = 0
    prefix_len_gpu: int = 0
    prefix_len_cpu: int = 0


@dataclasses.dataclass(slots=True)
class Times:
    """Times of a request, in seconds since 1970; nan before they are known."""

    arrival_s: float
    first_token_s: float = math.nan
    last_token_s: float = math.nan
    finished_s: float = math.nan


class ResultQueue:
    """The results of one request. Any thread may read it, while the request runs and afterwards.

    A reader is woken when a token arrives. `reader` is set when the request is queued; `error` is
    what ended the request, if something did.
    """

    def __init__(
        self, num_prompt_tokens: int, num_top: int | None, arrival_s: float | None = None
    ) -> None:
        """`num_top`: how many of the most likely tokens to return with each token; None: no
        log-probabilities. `arrival_s`: when the request came, in seconds of the monotonic clock;
        None: now.
        """
        self._num_prompt_tokens = num_prompt_tokens
        self._num_top = num_top
        self._changed = threading.Condition()
        self._unread = GeneratedElements()
        self._num_generated = 0
        self._end: GenerateRequestStatus | None = None
        self._was_seen = False
        age_s = 0.0 if arrival_s is None else time.monotonic() - arrival_s
        self._times = Times(time.time() - age_s)
        self.reader: CompletionReader | None = None
        self.error: EnginebayError | None = None

    def GenerateStatus(self) -> GenerateRequestStatus:
        """Return how far the request is, without waiting.

        The first call after the end returns the status before it while tokens are unread. So a loop
        that reads tokens and then looks at the status reads them all.
        """
        with self._changed:
            if self._end is not None and (self._was_seen or not self._unread.ids_from_generate):
                return self._end
            self._was_seen = self._end is not None
            match self._num_generated:
                case 0:
                    return GenerateRequestStatus.Init
                case 1:
                    return GenerateRequestStatus.ContextFinished
            return GenerateRequestStatus.Generating

    def GeneratedLength(self) -> int:
        """Return the number of tokens that were generated so far, read or not."""
        with self._changed:
            return self._num_generated

    def Get(self) -> GeneratedElements | None:
        """Wait for a token, and return all tokens since the call before; None after the end."""
        return self._take(None)

    def GetWithTimeout(self, timeout_ms: int) -> GeneratedElements | None:
        """Like Get(), but wait `timeout_ms` milliseconds at most; None when no token came.
        RequestError (a ValueError) for anything but a number.
        """
        if not isinstance(timeout_ms, numbers.Real) or math.isnan(timeout_ms):
            given = f"timeout_ms = {shown(timeout_ms)}"
            raise RequestError(given, "a number of milliseconds", "Pass 100, for example.")
        return self._take(max(0.0, min(timeout_ms / 1000, threading.TIMEOUT_MAX)))

    def GetNoWait(self) -> GeneratedElements | None:
        """Return all tokens since the call before without waiting; None when there is none."""
        return self._take(0.0)

    def RequestStatInfo(self) -> dict[str, int]:
        """Return figures of the request as whole numbers, 0 before they are known.

        arrival_time, first_token_time, last_token_time: milliseconds since 1970.
        time_to_first_token, time_in_queue, finished_time: milliseconds since the arrival, of the
        first token, the begin of the prompt and the end. context_token_length,
        generated_token_length, context_cached_length: tokens of the prompt, of the output, and of
        the prompt that were in the cache. context_tps, generate_tps: tokens per second of the
        prompt, and of the output after its first token.
        """
        with self._changed:
            times, metrics, num = self._times, self._metrics, self._num_generated
            cached = metrics.num_cached_tokens if metrics else 0
            queued_s = metrics.first_scheduled_s - metrics.arrival_s if metrics else math.nan
            prompt_s = times.first_token_s - times.arrival_s - queued_s
            output_s = times.last_token_s - times.first_token_s
            figures = {
                "arrival_time": times.arrival_s * 1e3,
                "first_token_time": times.first_token_s * 1e3,
                "last_token_time": times.last_token_s * 1e3,
                "time_to_first_token": (times.first_token_s - times.arrival_s) * 1e3,
                "time_in_queue": queued_s * 1e3,
                "finished_time": (times.finished_s - times.arrival_s) * 1e3,
                "context_token_length": self._num_prompt_tokens,
                "generated_token_length": num,
                "context_cached_length": cached,
                "context_tps": _rate(self._num_prompt_tokens, prompt_s),
                "generate_tps": _rate(num - 1, output_s),
            }
        return {name: 0 if math.isnan(one) else round(one) for name, one in figures.items()}

    def wait(self) -> None:
        """Wait for the end of the request."""
        with self._changed:
            self._changed.wait_for(lambda: self._end is not None)

    @property
    def has_ended(self) -> bool:
        """Whether the request has ended, whatever was read."""
        return self._end is not None

    def put(self, event: Event) -> None:
        """Add an event of the request."""
        with self._changed:
            if isinstance(event, RequestEnded):
                self._finish(event)
            else:
                self._add(event)
            self._changed.notify_all()

    def _take(self, timeout_s: float | None) -> GeneratedElements | None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._unread.ids_from_generate or self._end is not None, timeout_s
            )
            if not self._unread.ids_from_generate:
                return None
            taken, self._unread = self._unread, GeneratedElements()
            if self._metrics is not None:
                taken.prefix_cache_len = self._metrics.num_cached_tokens
                taken.prefix_len_cpu = self._metrics.num_host_tokens
                taken.prefix_len_gpu = taken.prefix_cache_len - taken.prefix_len_cpu
            return taken

    def _add(self, chunk: StreamChunk) -> None:
        if not chunk.delta_token_ids:
            return
        self._times.last_token_s = time.time()
        if not self._num_generated:
            self._times.first_token_s = self._times.last_token_s
        self._num_generated += len(chunk.delta_token_ids)
        self._unread.ids_from_generate += chunk.delta_token_ids
        if self._num_top is None or chunk.logprobs is None:
            return
        for token_id, values in zip(chunk.delta_token_ids, chunk.logprobs, strict=True):
            best = sorted(values.items(), key=lambda pair: -pair[1])[: self._num_top]
            self._unread.log_probs_list.append(best)
            self._unread.token_logprobs_list.append(values[token_id])

    @property
    def _metrics(self) -> RequestMetrics | None:
        return None if self.reader is None else self.reader.progress

    def _finish(self, ended: RequestEnded) -> None:
        self._times.finished_s = time.time()
        self.error = ended.error
        if ended.error is None:
            self._end = GenerateRequestStatus.GenerateFinished
        elif isinstance(ended.error, InternalError):
            self._end = GenerateRequestStatus.InternalError
        else:
            self._end = GenerateRequestStatus.GenerateInterrupted


def _rate(num_tokens: int, seconds: float) -> float:
    return num_tokens / seconds if seconds > 0 and num_tokens > 0 else 0.0
