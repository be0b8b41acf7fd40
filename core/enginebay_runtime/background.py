"""Background: runs jobs one after the other on a thread of its own. AfterRuns starts such jobs."""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable, Hashable, Iterable
from typing import Protocol

from enginebay.waits import has_ended

log = logging.getLogger("enginebay.background")


class EndedError(Exception):
    """A job that ended early because it was interrupted."""


class Helper(Protocol):
    """What works for jobs, such as a process. Any thread may call both methods."""

    def interrupt(self) -> None:
        """Make the running job raise EndedError, if it waits for this helper."""

    def rest(self) -> None:
        """Give back what is held for jobs, unless one of another thread needs it."""


class Background:
    """Runs jobs in order on one thread, from start() on. Any thread may call any method.

    The thread ends before its next job after stop(), and when the program ends. An error in a job
    is logged, and the next job runs. EndedError ends the thread without a log, and another start()
    runs this job again.
    """

    def __init__(
        self,
        jobs: Iterable[Callable[[], object]] = (),
        name: str = "background",
        helper: Helper | None = None,
    ) -> None:
        """`name` is the name of the thread. stop() interrupts the `helper`, which rests when the
        thread ends.
        """
        self._jobs = collections.deque(jobs)
        self._name, self._helper = name, helper
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()

    @property
    def is_done(self) -> bool:
        """Whether every job has run, or failed."""
        return not self._jobs

    def start(self) -> None:
        """Start a thread for the jobs that have not run. Does nothing when no job is left or the
        thread is running.
        """
        with self._lock:
            if self.is_done:
                return
            if self._thread is not None and self._thread.is_alive():
                self._stopping.clear()  # stop() had left it behind
                return
            self._stopping = threading.Event()
            # Not a daemon: Python would end while a job is inside a library. Instead the thread
            # itself checks whether the program ends.
            self._thread = threading.Thread(
                target=self._run, args=(self._stopping,), name=self._name, daemon=False
            )
            self._thread.start()

    def stop(self) -> bool:
        """Begin no more jobs, and wait for the running one (see has_ended). Returns whether the
        thread was running.
        """
        with self._lock:
            self._stopping.set()
            thread = self._thread
            was_running = thread is not None and thread.is_alive()
            if thread is not None and thread is not threading.current_thread():
                # Again and again, because the job may only begin now.
                interrupt = None if self._helper is None else self._helper.interrupt
                if has_ended(thread, interrupt):
                    self._thread = None
            return was_running

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the thread has ended or the time is over. Returns whether every job has
        run, or failed.
        """
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        return self.is_done

    def _run(self, stopping: threading.Event) -> None:
        try:
            self._run_jobs(stopping)
        finally:
            if self._helper is not None:
                self._helper.rest()

    def _run_jobs(self, stopping: threading.Event) -> None:
        while self._jobs and not stopping.is_set() and threading.main_thread().is_alive():
            try:
                self._jobs[0]()
            except EndedError:
                return
            except BaseException:
                log.exception("thread %s goes on after an error", self._name)
            self._jobs.popleft()


class AfterRuns:
    """Does something for a key, on a thread of its own, after it has run `num_runs` times."""

    def __init__(self, num_runs: int, name: str, helper: Helper | None = None) -> None:
        """`name` is the name of the threads; `helper` as for Background."""
        self._num_runs, self._name, self._helper = num_runs, name, helper
        self._runs: collections.Counter[Hashable] = collections.Counter()
        self._started: list[Background] = []

    def count(
        self, key: Hashable, make_job: Callable[[], Callable[[], object]], num_runs: int = 1
    ) -> None:
        """Count runs. When there are enough, `make_job` is called here, and what it returns is
        started.
        """
        before = self._runs[key]
        self._runs[key] += num_runs
        if before < self._num_runs <= self._runs[key]:
            job = Background([make_job()], self._name, self._helper)
            self._started.append(job)
            job.start()

    def stop(self) -> None:
        """Wait for the jobs that run, and forget all runs."""
        for job in self._started:
            job.stop()
        self._started.clear()
        self._runs.clear()
