"""Generation: the engine requests that one HTTP request causes, from submission to end."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from enginebay.outputs import RequestOutput, StreamChunk
from enginebay.serving.events import AsyncEvents, Event, RequestEnded
from enginebay.serving.prompts import Prompt
from enginebay.serving.requests import RequestHandle
from enginebay.types import FinishReason, SamplingParams
from enginebay_server.errors import ApiError
from enginebay_server.ingress import Receive
from enginebay_server.lanes import Lane
from enginebay_server.limits import ConcurrencyLimit
from enginebay_server.metrics import ModelMetrics
from enginebay_server.request_span import RequestSpan
from enginebay_server.served import ServedModel

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True, slots=True)
class PromptJob:
    """One prompt and its SamplingParams; `turn` has scheduling keywords of LLM.submit."""

    prompt: Prompt
    params: SamplingParams
    turn: Mapping[str, Any]


class Generation:
    """Engine requests that are submitted, read and ended together, on one event loop.

    close() aborts the requests that have not ended and frees their places. The owner must call it.
    """

    def __init__(
        self,
        model: ServedModel,
        metrics: ModelMetrics,
        limit: ConcurrencyLimit,
        lane: Lane,
        prefix: str,
    ) -> None:
        """`metrics` are those of the model. Prompts are prepared on `lane`. The id begins with
        `prefix`.
        """
        self.model = model
        self.id = f"{prefix}{uuid.uuid4().hex}"
        self.handles: Sequence[RequestHandle] = ()
        self.span: RequestSpan | None = None
        self.usage_since_s: float | None = None
        """The value of Usage.since_s for this generation's answer."""
        self._metrics = metrics
        self._num_open: list[int] = []
        """By job, the completions that are returned and whose end was not counted yet."""
        self._last_s: dict[tuple[str, int], float] = {}
        self._limit = limit
        self._lane = lane
        self._has_place = False
        self._events = AsyncEvents()
        self._is_closed = False

    async def start(self, make: Callable[[], Sequence[PromptJob]], *, stream: bool) -> None:
        """Wait for a place, then make the jobs and submit them on a thread of the lane.

        Raises ApiError 429 when too many requests wait, and the errors of `make` and of the engine.
        After an error no request of this generation runs.
        """
        await self._limit.enter()
        self._has_place = True
        if self._is_closed:  # the client left meanwhile
            self._leave()
            raise client_left()
        try:
            self.handles, self._num_open = await self._lane.run(self._submit, make, stream)
        except BaseException:
            self.close()
            raise

    def _submit(
        self,
        make: Callable[[], Sequence[PromptJob]],
        stream: bool,  # noqa: FBT001
    ) -> tuple[list[RequestHandle], list[int]]:
        """Return the handles of the jobs, and the number of completions that each returns."""
        jobs = make()
        handles = [
            self.model.llm.submit(
                job.prompt,
                job.params,
                events=self._events,
                request_id=f"{self.id}-{index}",
                stream=stream,
                lora=self.model.lora,
                **job.turn,
            )
            for index, job in enumerate(jobs)
        ]
        if self.span is not None:
            self.span.submitted(jobs[0].params, handles, stream=stream)
        return handles, [job.params.n for job in jobs]

    def place_of(self, event: Event) -> int:
        """Return the index of the job that an event belongs to."""
        return int(event.request_id.rpartition("-")[2])

    async def get(self) -> list[Event]:
        """Wait for events, count them in the metrics, and return them. Once the generation is
        closed, return [].
        """
        events = await self._events.get()
        if self.span is not None:
            self.span.see(events)
        now_s = time.monotonic()
        for event in events:
            place = self.place_of(event)
            if isinstance(event, StreamChunk):
                self._count_chunk(event, now_s)
            elif event.error is not None:
                self._count_ends(place, "error", self._num_open[place])
            elif self._num_open[place] and event.output is not None:
                # Not streamed, so its completions were not counted yet.
                for one in event.output.outputs:
                    self._count_ends(place, one.finish_reason or "error", 1)
        return events

    def _count_chunk(self, chunk: StreamChunk, now_s: float) -> None:
        key = chunk.request_id, chunk.index
        num_tokens = len(chunk.delta_token_ids)
        before_s = self._last_s.get(key)
        if num_tokens:
            self._last_s[key] = now_s
            if before_s is not None:
                self._metrics.inter_token.observe((now_s - before_s) / num_tokens, num_tokens)
        if chunk.finish_reason is not None:
            self._count_ends(self.place_of(chunk), chunk.finish_reason, 1)

    def _count_ends(self, place: int, reason: FinishReason, times: int) -> None:
        """Count the end of completions of a job, each of which is counted once."""
        times = min(times, self._num_open[place])
        self._metrics.num_ended[reason] += times
        self._num_open[place] -= times

    async def outputs(self) -> list[RequestOutput]:
        """Return the outputs in the order of the jobs; raises the error of the first that fails."""
        found: dict[int, RequestOutput] = {}
        while len(found) < len(self.handles):
            events = await self.get()
            if not events:
                raise client_left()
            for event in events:
                assert isinstance(event, RequestEnded), "nothing was submitted for a stream"
                found[self.place_of(event)] = finished_output(event)
        return [found[place] for place in range(len(found))]

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of all prompts."""
        return sum(len(handle.prompt_token_ids) for handle in self.handles)

    def close(self) -> None:
        """Abort the requests that have not ended, and give the place to the next request."""
        self._is_closed = True
        for place, count in enumerate(self._num_open):
            self._count_ends(place, "abort", count)
        self._events.close()
        self._leave()

    def _leave(self) -> None:
        if self._has_place:
            self._has_place = False
            self._limit.leave()


def finished_output(event: RequestEnded) -> RequestOutput:
    """Return the output of an ended request, or raise its error; ApiError if it was aborted."""
    if event.error is not None:
        raise event.error
    assert event.output is not None, "a request ends with an error or an output"
    if any(one.finish_reason in ("abort", "error") for one in event.output.outputs):
        raise ApiError(503, "the server ended the request", code="request_aborted")
    return event.output


async def until_gone(receive: Receive, work: Awaitable[Result]) -> Result:
    """Return the result of `work`. When the client leaves, cancel it and raise ApiError."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.create_task(gone(receive))
    watcher.add_done_callback(functools.partial(cancel_after, task))
    try:
        return await task
    except asyncio.CancelledError:
        if watcher.done() and not watcher.cancelled():
            raise client_left() from None
        raise
    finally:
        watcher.cancel()
        task.cancel()
        del task  # its exception's traceback has this frame, and all that is in it


def cancel_after(task: asyncio.Future[Any], watcher: asyncio.Task[None]) -> None:
    """Cancel a task when its watcher has ended, unless the watcher was cancelled."""
    if not watcher.cancelled():
        task.cancel()


def client_left() -> ApiError:
    """Return the error of a request whose client has left, which reads no answer."""
    return ApiError(499, "the client left before the answer was complete")


async def gone(receive: Receive) -> None:
    """Wait until the client has left, after its whole body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass
