"""Serving: the jobs of one engine from submission to the last update, by id, and their counts."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from enginebay.contracts.text import Tokenizer
from enginebay.serving.events import Events
from enginebay.serving.requests import Requests
from enginebay_esurge.jobs import Job
from enginebay_esurge.outputs import Assembly, RequestOutput
from enginebay_esurge.service import Service
from enginebay_esurge.totals import Totals

Item = TypeVar("Item")


class Updates(Iterator[RequestOutput]):
    """The updates of one request. Any thread may close it. Closing or dropping it ends the
    request.
    """

    def __init__(
        self,
        events: Events,
        assembly: Assembly,
        finish: Callable[[Assembly], RequestOutput],
        abandon: Callable[[Sequence[Assembly]], None],
    ) -> None:
        self._events = events
        self._assembly = assembly
        self._finish = finish
        self._end = weakref.finalize(self, abandon, [assembly])
        self._end.atexit = False

    def __next__(self) -> RequestOutput:
        goes_on = False
        try:
            events = [] if self._assembly.done else self._events.get()
            if not events:
                raise StopIteration
            for event in events:
                self._assembly.take(event)
            if self._assembly.done:
                return self._finish(self._assembly)
            goes_on = True
            return self._assembly.output()
        finally:
            if not goes_on:
                self.close()

    def close(self) -> None:
        """End the request. A thread that waits for an update receives StopIteration."""
        self._events.close()
        self._end()


class Serving:
    """Queues jobs and reads them on the caller's thread. Only the counts of ended jobs are kept."""

    def __init__(self, service: Service, tokenizer: Tokenizer) -> None:
        self.service = service
        self.totals = Totals()
        self._requests = Requests(tokenizer, service)
        self._open: dict[Assembly, None] = {}

    @property
    def num_open(self) -> int:
        """Number of jobs whose last update was not read, and which were not abandoned."""
        return len(self._open)

    def collect(self, jobs: Sequence[Job], *, is_shown: bool) -> list[RequestOutput]:
        """Queue jobs and wait for all of them; returns their outputs in order. The first error is
        raised and ends the other jobs.
        """
        events = Events()
        assemblies = self._queue(jobs, events, streams=False)
        by_id = {one.job.prepared.request_id: one for one in assemblies}
        outputs: dict[str, RequestOutput] = {}
        try:
            for event in _with_bar(events, len(jobs), is_shown=is_shown):
                by_id[event.request_id].take(event)
                outputs[event.request_id] = self._finish(by_id[event.request_id])
            return [outputs[request_id] for request_id in by_id]
        finally:
            events.close()
            self._abandon(assemblies)

    def updates(self, job: Job) -> Updates:
        """Queue a job at once, and return its updates; the last one is finished. Dropping them ends
        the job.
        """
        events = Events()
        [assembly] = self._queue([job], events, streams=True)
        return Updates(events, assembly, self._finish, self._abandon)

    def abort(self, request_id: str) -> None:
        """Abort a job with all its completions. An unknown or finished id is ignored."""
        self._requests.abort(request_id)

    def _queue(self, jobs: Sequence[Job], events: Events, *, streams: bool) -> list[Assembly]:
        with self.service.lock:  # weights must not change between submission and _open
            self.service.check_running()
            prepared = [job.prepared for job in jobs]
            made = self._requests.submit(prepared, events, streams=streams)
            each = zip(jobs, made, strict=True)
            assemblies = [Assembly(job, one.readers) for job, one in each]
            self._open.update(dict.fromkeys(assemblies))
        return assemblies

    def _finish(self, assembly: Assembly) -> RequestOutput:
        output = assembly.output()
        if self._forget(assembly):
            if assembly.failed:
                self.totals.failed(output.num_generated_tokens)
            else:
                self.totals.completed(output)
        return output

    def _abandon(self, assemblies: Sequence[Assembly]) -> None:
        """Count unfinished jobs as failed, and forget them."""
        for assembly in assemblies:
            if self._forget(assembly):
                self.totals.failed(sum(len(reader.token_ids) for reader in assembly.readers))

    def _forget(self, assembly: Assembly) -> bool:
        """Forget a job; returns False if it was forgotten already."""
        missing = object()
        return self._open.pop(assembly, missing) is not missing


def _with_bar(items: Iterable[Item], total: int, *, is_shown: bool) -> Iterator[Item]:
    """Yield the items, with a progress bar for several items on a terminal."""
    if not is_shown or total < 2 or not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(items, "generating", total, console=Console(stderr=True), transient=True)
