"""RequestSpan: what becomes the span of one HTTP request, and part of its line in the log. It needs
no tracing library.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

from enginebay.outputs import RequestMetrics, StreamChunk
from enginebay.types import SamplingParams
from enginebay_server.errors import ApiError

if TYPE_CHECKING:
    from enginebay.serving.events import Event, RequestEnded
    from enginebay.serving.requests import RequestHandle

SPAN_KEY = "enginebay.span"
"""The key of a request's RequestSpan in its ASGI scope; without tracing there is none."""

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
"""`gen_ai.operation.name` by path."""

PARAMETERS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "frequency_penalty",
    "presence_penalty",
    "seed",
)
"""Fields of SamplingParams that are attributes `gen_ai.request.NAME`."""


def request_span(scope: MutableMapping[str, Any]) -> RequestSpan | None:
    """Return the span of a request; None when the server sends no traces and logs no requests."""
    found: RequestSpan | None = scope.get(SPAN_KEY)
    return found


class RequestSpan:
    """Collects the attributes of one request, by the GenAI semantic conventions of OpenTelemetry.

    `error` is the failure of a request, also of one whose stream has begun. It is None for a
    request that the server refused, whose status says so.
    """

    def __init__(self, method: str, path: str) -> None:
        self.name = f"{method} {path}"
        self.error: ApiError | None = None
        self.model: str | None = None
        """The name of the model that runs for the request."""
        self.num_prompt = self.num_new = 0
        """Tokens of all prompts, and new tokens."""
        self._operation = OPERATIONS.get(path)
        self._attributes: dict[str, Any] = {"http.request.method": method, "url.path": path}
        self._began_s = time.monotonic()
        self._first_token_s = self._first_step_s = math.inf
        self._is_stream = False
        self._num_cached = 0
        self._reasons: dict[tuple[str, int], str] = {}

    def begin(self, model: str, response_id: str | None) -> None:
        """A model was chosen for the request."""
        self.name, self.model = f"{self._operation} {model}", model
        self._attributes |= {
            "gen_ai.operation.name": self._operation,
            "gen_ai.provider.name": "enginebay",
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
        }
        if response_id is not None:
            self._attributes["gen_ai.response.id"] = response_id

    def submitted(
        self, params: SamplingParams, handles: Sequence[RequestHandle], *, stream: bool
    ) -> None:
        """The prompts of the request were given to the engine."""
        self._is_stream = stream
        self.count_prompt(sum(len(handle.prompt_token_ids) for handle in handles))
        given = {name: getattr(params, name) for name in PARAMETERS}
        self._attributes |= {
            f"gen_ai.request.{name}": value for name, value in given.items() if value is not None
        }
        self._attributes["gen_ai.request.choice.count"] = params.n
        if stream:
            self._attributes["gen_ai.request.stream"] = True
        if params.stop:
            self._attributes["gen_ai.request.stop_sequences"] = list(params.stop)

    def count_prompt(self, num_tokens: int) -> None:
        """Set the number of tokens of all prompts."""
        self.num_prompt = self._attributes["gen_ai.usage.input_tokens"] = num_tokens

    def see(self, events: Iterable[Event]) -> None:
        """Count the tokens, ends and times of events."""
        for event in events:
            if isinstance(event, StreamChunk):
                self.num_new += len(event.delta_token_ids)
                if event.delta_token_ids:
                    self._first_token_s = min(self._first_token_s, time.monotonic())
                if event.finish_reason is not None:
                    self._reasons[event.request_id, event.index] = event.finish_reason
                self._see_times(event.metrics, counts_prompt=event.index == 0)
            elif event.output is not None and not self._is_stream:
                self._see_output(event)

    def _see_output(self, event: RequestEnded) -> None:
        assert event.output is not None, "the caller has looked"
        self.num_new += event.output.num_generated_tokens
        for one in event.output.outputs:
            self._reasons[event.request_id, one.index] = one.finish_reason or "error"
        self._see_times(event.output.metrics, counts_prompt=True)

    def _see_times(self, times: RequestMetrics | None, *, counts_prompt: bool) -> None:
        """Take the times of a completion that has ended."""
        if times is None:
            return
        if counts_prompt:  # completions of one prompt share what the cache had
            self._num_cached += times.num_cached_tokens
        if not math.isnan(times.first_scheduled_s):
            self._first_step_s = min(self._first_step_s, times.first_scheduled_s)
        if not math.isnan(times.first_token_s):
            self._first_token_s = min(self._first_token_s, times.first_token_s)

    def end(self, status: int) -> dict[str, Any]:
        """Return all attributes; `status` is 0 when the client left before the answer."""
        found = dict(self._attributes)
        if status:
            found["http.response.status_code"] = status
        if self.error is not None:
            found["error.type"] = self.error.code or str(self.error.status)
        elif status >= 400:
            found["error.type"] = str(status)
        if "gen_ai.usage.input_tokens" not in found or self._operation == "embeddings":
            return found
        found["gen_ai.usage.output_tokens"] = self.num_new
        found["gen_ai.usage.cache_read.input_tokens"] = self._num_cached
        found["gen_ai.response.finish_reasons"] = list(self._reasons.values()) or ["abort"]
        for name, at_s in (
            ("time_to_first_token", self._first_token_s),
            ("time_in_queue", self._first_step_s),
        ):
            if math.isfinite(at_s):
                found[f"gen_ai.latency.{name}"] = at_s - self._began_s
        return found
