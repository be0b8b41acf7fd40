"""Serving: the jobs of one engine from submission to their last update, by id, and counted."""

from __future__ import annotations

import itertools
import queue
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from enginebay.llm.assemble import CompletionReader
from enginebay.llm.reading import Ends, News, Tell, takes
from enginebay.text import Tokenizer
from enginebay_esurge.jobs import Active, Job
from enginebay_esurge.outputs import Assembly, RequestOutput
from enginebay_esurge.service import Service
from enginebay_esurge.totals import Totals

Item = TypeVar("Item")


class Updates(Iterator[RequestOutput]):
    """The updates of one request. Any thread may close it; closing it, or letting go of it, ends
    the request.
    """

    def __init__(
        self,
        news: queue.SimpleQueue[News | None],
        assembly: Assembly,
        finish: Callable[[Assembly], RequestOutput],
        abandon: Callable[[Sequence[Assembly]], None],
    ) -> None:
        self._news = news
        self._assembly = assembly
        self._finish = finish
        self._is_over = False
        self._end = weakref.finalize(self, abandon, [assembly])
        self._end.atexit = False

    def __next__(self) -> RequestOutput:
        goes_on = False
        try:
            if self._is_over or not self._take(self._news.get()):
                raise StopIteration
            if self._assembly.done:
                return self._finish(self._assembly)
            goes_on = True
            return self._assembly.output()
        finally:
            if not goes_on:
                self.close()

    def _take(self, news: News | None) -> bool:
        """Take in this and all that waits behind it. False: the stream was closed."""
        while news is not None:
            self._assembly.take(news)
            if self._assembly.done or self._news.empty():
                return True
            news = self._news.get()
        return False

    def close(self) -> None:
        """End the request, if it has not ended. A thread that waits for an update gets
        StopIteration.
        """
        self._end()
        self._is_over = True
        self._news.put(None)


class Serving:
    """Queues jobs and reads them on the caller's thread. Nothing is kept of one that has ended but
    its counts.
    """

    def __init__(self, service: Service, tokenizer: Tokenizer) -> None:
        self.service = service
        self.tokenizer = tokenizer
        self.active = Active()
        self.totals = Totals()

    def collect(self, jobs: Sequence[Job], *, is_shown: bool) -> list[RequestOutput]:
        """Queue jobs, and wait for all: their outputs in order. An error of one is raised, and ends
        the others.
        """
        news: queue.SimpleQueue[News] = queue.SimpleQueue()
        assemblies = self._queue(jobs, news.put, only_ends=True)
        owner = {reader: assembly for assembly in assemblies for reader in assembly.readers}
        outputs: dict[int, RequestOutput] = {}

        def get() -> News:
            one = news.get()
            owner[one.reader].take(one)
            return one

        try:
            ends = Ends([assembly.readers for assembly in assemblies])
            for index in _with_bar(ends.wait(get), len(jobs), is_shown=is_shown):
                outputs[index] = self._finish(assemblies[index])
            return [outputs[index] for index in range(len(jobs))]
        finally:
            self._abandon(assemblies)

    def updates(self, job: Job) -> Updates:
        """Queue a job at once; its updates, the last one finished. Leaving the iterator ends the
        job.
        """
        news: queue.SimpleQueue[News | None] = queue.SimpleQueue()
        [assembly] = self._queue([job], news.put, only_ends=False)
        return Updates(news, assembly, self._finish, self._abandon)

    def abort(self, request_id: str) -> None:
        """End a job with all its completions; one that is not under way is left alone."""
        job = self.active.find(request_id)
        for request in job.requests if job is not None else ():
            self.service.abort(request.request_id)

    def _queue(self, jobs: Sequence[Job], tell: Tell, *, only_ends: bool) -> list[Assembly]:
        groups = [
            [
                CompletionReader(request, self.tokenizer, self.service.abort)
                for request in job.requests
            ]
            for job in jobs
        ]
        readers = list(itertools.chain.from_iterable(groups))
        requests = [reader.request for reader in readers]
        with (
            self.service.lock
        ):  # weights are not exchanged between a job's being known and its being queued
            self.service.check_running()
            self.active.add(jobs)
            try:
                self.service.submit(requests, takes(readers, tell, only_ends=only_ends))
            except BaseException:
                self.active.remove(jobs)
                raise
        return [Assembly(job, group) for job, group in zip(jobs, groups, strict=True)]

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
                    self.service.abort(reader.request.request_id)
            if self.active.remove([assembly.job]):
                self.totals.failed(sum(len(reader.token_ids) for reader in assembly.readers))


def _with_bar(items: Iterable[Item], total: int, *, is_shown: bool) -> Iterator[Item]:
    """The same, with a progress bar for several on a terminal."""
    if not is_shown or total < 2 or not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(items, "generating", total, console=Console(stderr=True), transient=True)
