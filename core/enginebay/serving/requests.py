"""Requests: the unfinished requests of one engine, by id."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import threading
from collections.abc import Collection, Sequence
from typing import Protocol

from enginebay.contracts.text import Tokenizer
from enginebay.errors import RequestError, shown
from enginebay.outputs import RequestMetrics, RequestOutput
from enginebay.serving.assemble import CompletionReader
from enginebay.serving.choice import BestOf
from enginebay.serving.events import Event, EventReader, LoopWakers, RequestEnded
from enginebay.serving.running import Running, TakeEvent, TokenEvent, Wake
from enginebay.types import Request


class RequestRunner(Protocol):
    """Runs requests: an EngineLoop, or a service that starts and stops one."""

    def submit(self, requests: Sequence[Request], takes: Sequence[TakeEvent]) -> Sequence[Running]:
        """Queue all requests or none; the loop calls takes[i] with each event of requests[i]."""

    def abort(self, request_id: str) -> None:
        """End a completion, if it has not ended."""


@dataclasses.dataclass(frozen=True, slots=True)
class RequestHandle:
    """A submitted request. Its events have this `request_id`, and those of its completions an index
    from 0 to num_completions - 1.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    num_completions: int


@dataclasses.dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of unfinished requests. A `running` request has at least one completion in a row of
    the engine; a `waiting` request has none yet.
    """

    waiting: int
    running: int


class Completion:
    """A request as its caller sees it: one prompt with all its completions, each of which is a
    Request of the loop. Once it is submitted, it also has what turns their tokens into events. Its
    methods belong to the delivery thread, except open(), abandon() and abort().
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        requests: tuple[Request, ...],
        choice: BestOf | None = None,
    ) -> None:
        """`prompt`: its text, or None when it was given as token ids or Segments. `requests`: one
        for each sequence that is made. `choice` selects which of them are returned; None: all.
        """
        self.request_id, self.prompt, self.prompt_token_ids = request_id, prompt, prompt_token_ids
        self.requests, self.choice = requests, choice
        self.readers: list[CompletionReader] = []
        self.running: Sequence[Running] = ()
        self._ended: RequestEnded | None = None
        self._num_left = len(requests)

    def open(self, events: EventReader, submits: Requests, *, streams: bool) -> None:
        """Connect it to the reader of its events. Without `streams`, RequestEnded is the only
        event.
        """
        self.readers = [
            CompletionReader(
                dataclasses.replace(request, streams=streams), submits.tokenizer, submits.runs.abort
            )
            for request in self.requests
        ]
        self.inbound, self._wake = events.connect(submits.wakers)
        self._submits, self._streams = submits, streams

    @property
    def handle(self) -> RequestHandle:
        """The handle that the caller gets."""
        return RequestHandle(self.request_id, tuple(self.prompt_token_ids), len(self.readers))

    @property
    def has_ended(self) -> bool:
        """Whether the loop has ended all its sequences."""
        return bool(self.running) and all(running.has_ended for running in self.running)

    def abandon(self) -> None:
        """End the request, if it has not ended, and free its id at once. Any thread may call
        this.
        """
        self.abort()
        self._submits.forget(self)

    def abort(self) -> None:
        """End the completions that have not ended. Any thread may call this."""
        for reader in self.readers:
            if not reader.done:
                self._submits.runs.abort(reader.request.request_id)

    def take(self, reader: CompletionReader, event: TokenEvent) -> Wake | None:
        """Receive an event of a completion from the loop. Returns what wakes the reader."""
        if reader.finish_reason is not None or not self._num_left:
            return None
        if event.error is not None:
            self._num_left = 0
            reader.finish_reason = "error"
            self.abort()
            self._ended = RequestEnded(self.request_id, error=event.error)
        elif not reader.feed(event):
            return None
        elif reader.finish_reason is not None:
            self._num_left -= 1
            if not self._num_left:
                self._ended = RequestEnded(self.request_id, self._output())
        if not self._num_left:
            self._submits.forget(self)
        elif not self._streams:
            return None
        self.inbound.put(self)
        return self._wake()

    def _output(self) -> RequestOutput:
        """The finished output of the prompt. Its metrics are those of the first returned sequence;
        num_generated_tokens counts all sequences that were made.
        """
        readers, choice = self.readers, self.choice
        made = [reader.completion() for reader in readers]
        completions = made if choice is None else choice.returned(made)
        metrics = readers[0 if choice is None else choice.order(made)[0]].metrics
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            completions,
            finished=True,
            metrics=metrics or RequestMetrics(),
            tokens_per_second=0.0 if metrics is None else metrics.tokens_per_second,
            num_generated_tokens=sum([len(one.token_ids) for one in made]),
            prompt_logprobs=readers[0].prompt_logprobs,
            hidden=readers[0].hidden,
        )

    def read(self) -> list[Event]:
        """Return the events since the last call: a chunk of each completion that has news, and the
        end. One thread at a time may call this.
        """
        ended = self._ended  # before the chunks: after the end no chunk has news
        if ended is not None:
            self._ended = None
        news: list[Event] = []
        for reader in self.readers if self._streams else ():
            if (chunk := reader.read()) is not None:
                news.append(chunk)
        return news if ended is None else [*news, ended]


class Requests:
    """Submits requests to a loop, and finds unfinished ones by id. Any thread may call it."""

    def __init__(self, tokenizer: Tokenizer, runs: RequestRunner) -> None:
        self.wakers = LoopWakers()
        self.runs = runs
        self.tokenizer = tokenizer
        self._active: dict[str, Completion] = {}
        # Reentrant: garbage collection inside it may end a reader, which calls forget().
        self._lock = threading.RLock()

    def __len__(self) -> int:
        """Number of requests whose RequestEnded was not yet put into their events."""
        return len(self._active)

    def submit(
        self, made: Sequence[Completion], events: EventReader, *, streams: bool
    ) -> Sequence[Completion]:
        """Queue all requests or none; their events go to `events`. RequestError for the id of an
        unfinished request and for closed `events`, StoppedError after the loop has ended.
        """
        for one in made:
            one.open(events, self, streams=streams)
        with self._lock:
            for one in made:
                name = one.request_id
                if name in self._active:
                    raise RequestError(
                        f"request id {shown(name)}, which an unfinished request has",
                        "the id of no unfinished request",
                        "Pass another id, or abort the first request.",
                    )
            self._active |= {one.request_id: one for one in made}
        try:
            for one in made:
                one.inbound.add(one)
                if one.inbound.is_closed:
                    given = "a request with closed events"
                    raise RequestError(given, "events that are open", "Create new Events().")
            each = [(one, reader) for one in made for reader in one.readers]
            takes = [functools.partial(one.take, reader) for one, reader in each]
            queued = iter(self.runs.submit([reader.request for _, reader in each], takes))
        except BaseException:
            for one in made:
                self.forget(one)
                one.inbound.remove(one)
            raise
        for one in made:
            one.running = tuple(itertools.islice(queued, len(one.readers)))
            if one.inbound.is_closed:  # closed while it was being queued
                one.abandon()
        return made

    def abort(self, request_id: str) -> bool:
        """End a request and all its completions; their last events follow. False when no unfinished
        request has this id.
        """
        one = self._active.get(request_id)
        if one is not None:
            one.abort()
        return one is not None

    def counts(self, running: Collection[str]) -> Counts:
        """Numbers of unfinished requests. `running`: ids of requests with a completion in a row."""
        active = list(self._active.items())
        others = [one for name, one in active if name not in running]
        num_waiting = sum(not one.has_ended for one in others)
        return Counts(num_waiting, len(active) - len(others))

    def forget(self, one: Completion) -> None:
        """Remove a request that has ended, or that was not queued."""
        with self._lock:
            if self._active.get(one.request_id) is one:
                del self._active[one.request_id]


def with_id(one: Completion, request_id: str) -> Completion:
    """The same under an id that the caller chose. RequestError for an id that is empty or not a
    string.
    """
    if not isinstance(request_id, str) or not request_id:
        raise RequestError(
            f"request id {shown(request_id)}", "text that is not empty", "Pass another id."
        )
    requests = tuple(
        dataclasses.replace(r, request_id=f"{request_id}/{r.index}", parent_id=request_id)
        for r in one.requests
    )
    return Completion(request_id, one.prompt, one.prompt_token_ids, requests, one.choice)
