"""Serving: the jobs of one engine from submission to their last update, by id, and counted."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence

from enginebay.llm.assemble import CompletionReader
from enginebay.text import Tokenizer
from enginebay_esurge.jobs import Active, Job
from enginebay_esurge.outputs import Assembly, RequestOutput
from enginebay_esurge.service import Service
from enginebay_esurge.totals import Totals


class Updates(Iterator[RequestOutput]):
    """The updates of one request. Closing it, or letting go of it, ends the request, also before the first update."""

    def __init__(self, updates: Generator[RequestOutput, None, None], end: Callable[[], None]) -> None:
        self._updates = updates
        self._end = weakref.finalize(self, end)
        self._end.atexit = False

    def __next__(self) -> RequestOutput:
        return next(self._updates)

    def close(self) -> None:
        """End the request, if it has not ended."""
        self._updates.close()
        self._end()


class Serving:
    """Queues jobs and reads them on the caller's thread. Nothing is kept of one that has ended but its counts."""

    def __init__(self, service: Service, tokenizer: Tokenizer) -> None:
        self.service = service
        self.tokenizer = tokenizer
        self.active = Active()
        self.totals = Totals()

    def collect(self, jobs: Sequence[Job], *, is_shown: bool) -> list[RequestOutput]:
        """Queue jobs, and wait for all: their outputs in order. An error of one is raised, and ends the others."""
        assemblies = self._queue(jobs)
        try:
            outputs = []
            for assembly in _with_bar(assemblies, is_shown=is_shown):
                while not assembly.done:
                    assembly.advance()
                outputs.append(self._finish(assembly))
            return outputs
        finally:
            self._abandon(assemblies)

    def updates(self, job: Job) -> Updates:
        """Queue a job at once; its updates, the last one finished. Leaving the iterator ends the job."""
        [assembly] = self._queue([job])
        return Updates(self._read(assembly), functools.partial(self._abandon, [assembly]))

    def abort(self, request_id: str) -> None:
        """End a job with all its completions; one that is not under way is left alone."""
        job = self.active.find(request_id)
        for request in job.requests if job is not None else ():
            self.service.abort(request.request_id)

    def _queue(self, jobs: Sequence[Job]) -> list[Assembly]:
        with self.service.lock:  # nobody exchanges weights between a job's being known and its being queued
            self.service.check_running()
            self.active.add(jobs)
            try:
                tickets = self.service.submit([request for job in jobs for request in job.requests])
            except BaseException:
                self.active.remove(jobs)
                raise
        readers = iter([CompletionReader(ticket, self.tokenizer, self.service.abort) for ticket in tickets])
        return [Assembly(job, [next(readers) for _ in job.requests]) for job in jobs]

    def _read(self, assembly: Assembly) -> Generator[RequestOutput, None, None]:
        try:
            while not assembly.done:
                if assembly.advance() and not assembly.done:
                    yield assembly.output()
            yield self._finish(assembly)
        finally:
            self._abandon([assembly])

    def _finish(self, assembly: Assembly) -> RequestOutput:
        output = assembly.output()
        if self.active.remove([assembly.job]):
            if assembly.failed:
                self.totals.failed(output.num_generated_tokens)
            else:
                self.totals.completed(output)
        return output

    def _abandon(self, assemblies: Sequence[Assembly]) -> None:
        """End and forget what was not finished."""
        for assembly in assemblies:
            for reader in assembly.readers:
                if not reader.done:
                    self.service.abort(reader.ticket.request.request_id)
            if self.active.remove([assembly.job]):
                self.totals.failed(sum(len(reader.token_ids) for reader in assembly.readers))


def _with_bar(assemblies: Sequence[Assembly], *, is_shown: bool) -> Iterator[Assembly]:
    """The same, with a progress bar for several on a terminal."""
    if not is_shown or len(assemblies) < 2 or not sys.stderr.isatty():
        yield from assemblies
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(assemblies, "generating", console=Console(stderr=True), transient=True)
