"""Background: jobs that run one after the other on a thread of their own, beside whoever started
them.
"""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable, Iterable

log = logging.getLogger("enginebay.background")


class Background:
    """Jobs in their order, begun by start(). Any thread may call any method.

    The thread ends before the next job when it is stopped, and when the program ends. A job that
    raises is logged and ends the thread; start() tries it again.
    """

    def __init__(self, jobs: Iterable[Callable[[], object]] = (), name: str = "background") -> None:
        """`name` is the thread's."""
        self._jobs = collections.deque(jobs)
        self._name = name
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()

    @property
    def is_done(self) -> bool:
        """Whether every job has run."""
        return not self._jobs

    def start(self) -> None:
        """Run the jobs that have not run; nothing happens when there is none, or the thread
        runs.
        """
        with self._lock:
            if self.is_done or (self._thread is not None and self._thread.is_alive()):
                return
            self._stopping = threading.Event()
            # No daemon: Python would end while a job is inside a library. So the thread looks
            # itself whether the program ends.
            self._thread = threading.Thread(
                target=self._run, args=(self._stopping,), name=self._name, daemon=False
            )
            self._thread.start()

    def stop(self) -> bool:
        """Begin no other job, and wait for the one that runs; whether the thread was running."""
        with self._lock:
            self._stopping.set()
            thread, self._thread = self._thread, None
            was_running = thread is not None and thread.is_alive()
            if thread is not None and thread is not threading.current_thread():
                thread.join()
            return was_running

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the thread has ended; whether every job has run by then."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        return self.is_done

    def _run(self, stopping: threading.Event) -> None:
        while self._jobs and not stopping.is_set() and threading.main_thread().is_alive():
            try:
                self._jobs[0]()
            except BaseException:
                log.exception("%s ends after an error", self._name)
                return
            self._jobs.popleft()
