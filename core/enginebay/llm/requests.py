"""Requests: those of one engine from their submission to their end, by id, and counted."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import threading
from collections.abc import Collection, Sequence
from typing import Protocol

from enginebay.errors import RequestError, shown
from enginebay.llm.assemble import CompletionReader, output_of
from enginebay.llm.events import AsyncEvents, Event, Events, Inbound, LoopWakers, RequestEnded
from enginebay.llm.prepare import Prepared
from enginebay.loop.messages import Take, Ticket, TokenEvent, Wake
from enginebay.text import Tokenizer
from enginebay.types import Request


class Runs(Protocol):
    """What runs requests: an EngineLoop, or what starts and stops one."""

    def submit(self, requests: Sequence[Request], takes: Sequence[Take]) -> Sequence[Ticket]:
        """Queue requests, all or none, whose events `takes` are called with."""

    def abort(self, request_id: str) -> None:
        """End a completion, if it has not ended."""


@dataclasses.dataclass(frozen=True, slots=True)
class RequestHandle:
    """A submitted request. Its events bear `request_id`, and those of its completions an index from
    0 to num_completions - 1.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    num_completions: int


@dataclasses.dataclass(frozen=True, slots=True)
class Counts:
    """Requests that have not ended, as of now: `running` ones have a completion in a row of the
    engine, `waiting` ones do not, whether the engine's thread has taken them in or not.
    """

    waiting: int
    running: int


class Submission:
    """One request: makes events of what its completions bring. Its methods belong to the delivery
    thread, but for abandon().
    """

    def __init__(
        self,
        prepared: Prepared,
        readers: Sequence[CompletionReader],
        events: Events | AsyncEvents,
        requests: Requests,
        *,
        streams: bool,
    ) -> None:
        """Without `streams` the end is the only event."""
        self.prepared = prepared
        self.readers = readers
        self.tickets: Sequence[Ticket] = ()
        self._inbound, self._wake = events.connect(requests.wakers)
        self._requests = requests
        self._streams = streams
        self._num_left = len(readers)

    @property
    def inbound(self) -> Inbound:
        """Where its events go."""
        return self._inbound

    @property
    def takes(self) -> list[Take]:
        """For each completion what takes the loop's events."""
        return [functools.partial(self._take, reader) for reader in self.readers]

    @property
    def handle(self) -> RequestHandle:
        """What the caller gets."""
        one = self.prepared
        return RequestHandle(one.request_id, tuple(one.prompt_token_ids), len(self.readers))

    @property
    def has_ended(self) -> bool:
        """Whether the loop has ended each of its completions."""
        return bool(self.tickets) and all(ticket.has_ended for ticket in self.tickets)

    def abandon(self) -> None:
        """End the request, if it has not ended; its id is free at once. Any thread may call it."""
        self.abort()
        self._requests.forget(self)

    def abort(self) -> None:
        """End the completions that have not ended. Any thread may call it."""
        for reader in self.readers:
            if not reader.done:
                self._requests.runs.abort(reader.request.request_id)

    def _take(self, reader: CompletionReader, event: TokenEvent) -> Wake | None:
        if reader.done or not self._num_left:
            return None
        if event.error is not None:
            self._num_left = 0
            reader.finish_reason = "error"
            self.abort()
            return self._put(RequestEnded(self.prepared.request_id, error=event.error))
        chunk = reader.feed(event)
        new: list[Event] = [chunk] if chunk is not None and self._streams else []
        if reader.done:
            self._num_left -= 1
            if not self._num_left:
                output = output_of(self.prepared, self.readers)
                new.append(RequestEnded(self.prepared.request_id, output))
        return self._put(*new) if new else None

    def _put(self, *events: Event) -> Wake:
        if not self._num_left:
            self._requests.forget(self)
        self._inbound.put(self, *events)
        return self._wake()


class Requests:
    """Submits requests to a loop, and finds running requests by their ids. Any thread may call."""

    def __init__(self, tokenizer: Tokenizer, runs: Runs) -> None:
        self.wakers = LoopWakers()
        self.runs = runs
        self._tokenizer = tokenizer
        self._active: dict[str, Submission] = {}
        self._lock = threading.RLock()  # garbage may be collected, and a reader end, within it

    def __len__(self) -> int:
        """Requests whose end was not put into their events."""
        return len(self._active)

    def submit(
        self, prepared: Sequence[Prepared], events: Events | AsyncEvents, *, streams: bool
    ) -> list[Submission]:
        """Queue requests, all or none, and put their events into `events`. RequestError for an id
        that has not ended and for closed `events`, StoppedError after the loop's end.
        """
        made = [self._submission(one, events, streams=streams) for one in prepared]
        self._add(made)
        try:
            for one in made:
                one.inbound.add(one)
                _check_open(one.inbound)
            takes = list(itertools.chain.from_iterable(one.takes for one in made))
            readers = itertools.chain.from_iterable(one.readers for one in made)
            tickets = iter(self.runs.submit([reader.request for reader in readers], takes))
        except BaseException:
            for one in made:
                self.forget(one)
                one.inbound.remove(one)
            raise
        for one in made:
            one.tickets = tuple(itertools.islice(tickets, len(one.readers)))
            if one.inbound.is_closed:  # since then
                one.abandon()
        return made

    def abort(self, request_id: str) -> bool:
        """End a request with all its completions, whose events follow. False when there is none of
        this id that has not ended.
        """
        one = self._active.get(request_id)
        if one is not None:
            one.abort()
        return one is not None

    def counts(self, running: Collection[str]) -> Counts:
        """How many have not ended. `running`: the ids of requests with a completion in a row."""
        active = list(self._active.items())
        others = [one for name, one in active if name not in running]
        num_waiting = sum(not one.has_ended for one in others)
        return Counts(num_waiting, len(active) - len(others))

    def forget(self, one: Submission) -> None:
        """A request has ended, or was not queued."""
        with self._lock:
            if self._active.get(one.prepared.request_id) is one:
                del self._active[one.prepared.request_id]

    def _submission(
        self, prepared: Prepared, events: Events | AsyncEvents, *, streams: bool
    ) -> Submission:
        readers = [
            CompletionReader(
                dataclasses.replace(request, streams=streams), self._tokenizer, self.runs.abort
            )
            for request in prepared.requests
        ]
        return Submission(prepared, readers, events, self, streams=streams)

    def _add(self, made: Sequence[Submission]) -> None:
        with self._lock:
            for one in made:
                name = one.prepared.request_id
                if name in self._active:
                    raise RequestError(
                        f"request id {shown(name)}, which is under way",
                        "one that is not",
                        "Choose another, wait, or abort it.",
                    )
            self._active |= {one.prepared.request_id: one for one in made}


def with_id(prepared: Prepared, request_id: str) -> Prepared:
    """The same under an id that a caller chose. RequestError for an empty one, or no text."""
    if not isinstance(request_id, str) or not request_id:
        raise RequestError(
            f"request id {shown(request_id)}", "text that is not empty", "Choose another."
        )
    requests = tuple(
        dataclasses.replace(r, request_id=f"{request_id}/{r.index}", parent_id=request_id)
        for r in prepared.requests
    )
    return dataclasses.replace(prepared, request_id=request_id, requests=requests)


def _check_open(inbound: Inbound) -> None:
    if inbound.is_closed:
        raise RequestError(
            "a request for events that were closed", "open ones", "Make new Events()."
        )
