"""Runs checks in worker processes, each with a time limit. A process is replaced after a crash or a
timeout.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from enginebay.errors import InternalError
from enginebay.waits import wait_for_killed
from enginebay_testing.verdicts import FAULTS, Outcome

START_LIMIT_S = 180.0
"""Max seconds in which a worker must finish its imports."""

TAIL_BYTES = 4000

WORKER_ENVIRONMENT = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "OPENBLAS_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
}
"""Variables of a worker that the caller has not set. The oracles' products are small: several
threads wait for each other longer than they compute. Collectives need several devices.
"""

QUICK_FUSIONS = "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
"""The flag with which XLA compiles fusions for a CPU without MLIR, in half the time. JAX takes this
option for a process, not for one program (see `case_runs.QUICK_COMPILING`).
"""


@dataclasses.dataclass(frozen=True)
class PartName:
    """How workers are asked for a part: its label, and the entry point that registers it."""

    label: str
    package: str


@dataclasses.dataclass(frozen=True)
class CaseName:
    """A case as workers list it (see `cases.Case`)."""

    level: str
    target: str
    name: str
    representative: bool
    traits: dict[str, str]


@dataclasses.dataclass(frozen=True)
class CaseResult:
    """The outcome of one case of one part. `order` sorts results in the order of the parts and
    their cases.
    """

    part: PartName
    case: CaseName
    outcome: Outcome
    order: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class _Job:
    """A request to a worker: the list of a part's cases, or one case."""

    part: PartName
    level: str | None
    choices: Mapping[str, str | int | None]
    order: tuple[int, int]
    case: CaseName | None = None

    def request(self) -> bytes:
        asked: dict[str, Any] = {
            "do": "list" if self.case is None else "run",
            "part": self.part.label,
            "package": self.part.package,
            "level": self.level,
            "choices": dict(self.choices),
        }
        if self.case is not None:
            asked["case"] = dataclasses.asdict(self.case)
        return (json.dumps(asked) + "\n").encode()


class CheckWorker:
    """One process and its current job. stdout and stderr go to a file, the end of which is reported
    after a crash. With `quickly`, XLA compiles programs for a CPU with fewer optimizations.
    """

    def __init__(self, *, quickly: bool) -> None:
        ask_read, self._ask = os.pipe()
        self.answers, answer_write = os.pipe()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  # closed in `end`
        command = [
            sys.executable,
            "-m",
            "enginebay_testing.worker",
            str(ask_read),
            str(answer_write),
        ]
        environment = dict(WORKER_ENVIRONMENT)
        if quickly:
            environment["XLA_FLAGS"] += f" {QUICK_FUSIONS}"
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=self._said,
            pass_fds=(ask_read, answer_write),
            env=environment | os.environ,
            start_new_session=True,  # child processes of a check end with the worker
        )
        os.close(ask_read)
        os.close(answer_write)
        self._buffer = b""
        self.job: _Job | None = None
        self.since = time.monotonic()
        self.ready = False

    def give(self, job: _Job) -> None:
        """Send a job to the process."""
        self.job, self.since = job, time.monotonic()
        with contextlib.suppress(
            BrokenPipeError
        ):  # it died while idle: the next read finds its end
            os.write(self._ask, job.request())

    def read(self) -> dict[str, Any] | None:
        """Return the next answer, or None when there is none yet. EOFError when the process has
        ended.
        """
        chunk = os.read(self.answers, 1 << 20)
        if not chunk:
            raise EOFError
        self._buffer += chunk
        line, newline, rest = self._buffer.partition(b"\n")
        if not newline:
            return None
        self._buffer = rest
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> str:
        """Kill the process and its children; return how it ended and the last line of
        its output.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0 if self._gone() else 0.0)
        code = self._process.poll()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        wait_for_killed(self._process, "a check")
        for pipe in (self._ask, self.answers):
            os.close(pipe)
        with self._said as said:
            said.seek(max(0, said.seek(0, os.SEEK_END) - TAIL_BYTES))
            text = said.read().decode(errors="replace")
        how = "was stopped" if code is None else f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        return f"the worker process {how}{_last_words(text)}"

    def _gone(self) -> bool:
        """Return whether the answers have ended, so that the process will end."""
        return bool(select_now(self.answers)) and os.read(self.answers, 1) == b""


def select_now(pipe: int) -> list[int]:
    """Return the pipe if a read would not block."""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        return [key.fd for key, _ in selector.select(0)]


def _last_words(text: str) -> str:
    """Return the most telling line of a crash: a fatal error, else the last line."""
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    fatal = [line for line in lines if line.startswith("Fatal Python error")]
    last = (fatal or lines)[-1:]
    return f"; its last output: {last[0]}" if last else ""


class Pool:
    """Checks parts on `jobs` workers at a level (None: every level that works here) and yields
    results as they arrive.

    `choices` are the fields of `suites.Choices`. `wanted` selects the cases of a part. With
    `quickly`, workers compile with fewer optimizations on a CPU.
    """

    def __init__(
        self,
        jobs: int,
        timeout_s: float,
        level: str | None,
        wanted: Callable[[CaseName], bool],
        choices: Mapping[str, str | int | None] | None = None,
        *,
        quickly: bool = True,
    ) -> None:
        self._quickly = quickly
        self._jobs, self._timeout_s, self._level, self._wanted = jobs, timeout_s, level, wanted
        self._choices = dict(choices or {})
        self._workers: list[CheckWorker] = []
        self._queue: collections.deque[_Job] = collections.deque()
        self._selector = selectors.DefaultSelector()

    @property
    def num_waiting(self) -> int:
        """Return the number of known jobs that no worker has started."""
        return len(self._queue)

    def run(
        self, parts: Sequence[PartName], *, first_failure: bool = False
    ) -> Iterator[CaseResult]:
        """Yield the results of all wanted cases of the parts, in the order in which they end; with
        `first_failure`, up to the first case that fails.
        """
        jobs = (_Job(part, self._level, self._choices, (i, 0)) for i, part in enumerate(parts))
        self._queue.extend(jobs)
        try:
            while self._queue or any(w.job is not None for w in self._workers):
                self._employ()
                for result in self._wait():
                    yield result
                    if first_failure and result.outcome.verdict in FAULTS:
                        return
        finally:
            for worker in list(self._workers):
                self._dismiss(worker)
            self._selector.close()

    def _employ(self) -> None:
        busy = sum(w.job is not None for w in self._workers)
        while len(self._workers) < min(self._jobs, busy + len(self._queue)):
            worker = CheckWorker(quickly=self._quickly)
            self._selector.register(worker.answers, selectors.EVENT_READ, worker)
            self._workers.append(worker)
        for worker in self._workers:
            if worker.ready and worker.job is None and self._queue:
                worker.give(self._queue.popleft())

    def _wait(self) -> Iterator[CaseResult]:
        """Wait for the next event and yield its results: answers, deaths and timeouts."""
        waits = [self._left(w) for w in self._workers if w.job is not None or not w.ready]
        for key, _ in self._selector.select(max(0.0, min(waits, default=0.0))):
            worker: CheckWorker = key.data
            try:
                answer = worker.read()
            except EOFError:
                yield from self._died(worker)
                continue
            if answer is not None and not worker.ready:
                worker.ready = True
            elif answer is not None:
                yield from self._done(worker, answer)
        for worker in list(self._workers):
            if (worker.job is not None or not worker.ready) and self._left(worker) <= 0:
                yield from self._timed_out(worker)

    def _left(self, worker: CheckWorker) -> float:
        limit = self._timeout_s if worker.ready else START_LIMIT_S
        return worker.since + limit - time.monotonic()

    def _done(self, worker: CheckWorker, answer: dict[str, Any]) -> Iterator[CaseResult]:
        job, worker.job = worker.job, None
        assert job is not None, "a worker without a job answered"
        if job.case is not None:
            yield _result(job, Outcome(**answer))
        elif "failed" in answer:
            yield _result(job, Outcome("ERROR", answer["failed"]))
        else:
            cases = [CaseName(**each) for each in answer["cases"]]
            jobs = [
                dataclasses.replace(job, order=(job.order[0], i), case=case)
                for i, case in enumerate(cases)
                if self._wanted(case)
            ]
            self._queue.extendleft(reversed(jobs))

    def _died(self, worker: CheckWorker) -> Iterator[CaseResult]:
        seconds = time.monotonic() - worker.since
        job, said = worker.job, self._dismiss(worker)
        if job is None:
            raise InternalError(f"{said} before its first request")
        yield _result(job, Outcome("ERROR", said, seconds=seconds))

    def _timed_out(self, worker: CheckWorker) -> Iterator[CaseResult]:
        seconds = time.monotonic() - worker.since
        job, said = worker.job, self._dismiss(worker)
        if job is None:
            raise InternalError(f"{said}: it was not ready after {START_LIMIT_S:.0f} s")
        yield _result(
            job, Outcome("TIMEOUT", f"no answer within {self._timeout_s:g} s", seconds=seconds)
        )

    def _dismiss(self, worker: CheckWorker) -> str:
        self._selector.unregister(worker.answers)
        self._workers.remove(worker)
        return worker.end()


def _result(job: _Job, outcome: Outcome) -> CaseResult:
    """Return the results of a job; a part whose cases could not be listed gets one that says so."""
    case = job.case or CaseName(job.level or "run", "", "loads", representative=True, traits={})
    return CaseResult(job.part, case, outcome, job.order)
