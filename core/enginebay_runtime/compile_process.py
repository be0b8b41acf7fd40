"""CompileProcess: a process of low priority that compiles steps into the program store.

XLA compiles with the threads of its client, which also run the steps, and tracing holds Python's
lock. So steps that are compiled beside requests are traced and compiled in another process, and
this one loads them from the store.
"""

from __future__ import annotations

import errno
import functools
import logging
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from enginebay.config import EngineConfig
from enginebay.contracts.step_key import StepKey
from enginebay.errors import EnginebayError
from enginebay.text.worker.process import LimitedWorker, LimitError, WorkerError, WorkerLimits
from enginebay_runtime.background import EndedError
from enginebay_runtime.compile_worker import encoded
from enginebay_runtime.compiling import CompileElsewhere, StepShapes, StepSource

log = logging.getLogger("enginebay_runtime")

TARGET = "enginebay_runtime.compile_worker:make_worker"
"""What makes the function that answers in the process."""

LIMITS = WorkerLimits(time_s=1800.0, memory_bytes=None, stack_bytes=64 << 20)
"""For one step. XLA's compiler needs a deep stack for large programs."""

POLL_S = 0.02
"""After this time a waiting thread looks whether steps run, or the program ends."""

PAUSE_S, RUN_S = 0.5, 0.25
"""Beside steps that run without a pause, the process stops for PAUSE_S and runs for RUN_S in turn,
where it makes way for them.
"""

LOWEST_PRIORITY_NICE = 19
"""The nice value of a session that is to run only on cores that no other session uses."""

CompilePriority = Literal["high", "idle", "pauses"]
"""How a process that compiles makes way for steps. `high`: its session shares cores like any other.
`idle`: it runs on cores that are idle. `pauses`: as `idle`, and it also stops in turn while steps
run.
"""


def set_session_nice(pid: int, value: int) -> bool:
    """Set the nice value of the session that the process `pid` leads. Linux shares cores between
    sessions first ("autogroup"); the priority of a process counts only within its session. Systems
    without autogroups are left as they are. Returns False if the change must be tried again.
    """
    try:
        Path(f"/proc/{pid}/autogroup").write_text(str(value), encoding="ascii")
    except OSError as error:
        return error.errno != errno.EAGAIN  # Linux takes one change in a tenth of a second
    return True


class CompileProcess:
    """Compiles the steps of one engine elsewhere, one at a time. The first step starts the process.
    Any thread may call any method.
    """

    def __init__(
        self, config: EngineConfig, program_digest: str, is_busy: Callable[[], bool]
    ) -> None:
        """`config`: the resolved configuration, from which the process makes the same parts;
        `program_digest` tells whether they are the same. `is_busy`: whether steps run now.
        """
        settings = {"config": config.model_dump_json(), "digest": program_digest}
        self._digest = program_digest
        self._worker = LimitedWorker(TARGET, settings, LIMITS)
        self._is_busy = is_busy
        self._interrupted = threading.Event()
        self._turn, self._interrupting = threading.Lock(), threading.Lock()
        self._is_able = True

    def of(
        self, source: StepSource, *, priority: CompilePriority = "pauses"
    ) -> CompileElsewhere | None:
        """What compiles the steps of a source here; None where this process must: its parts were
        replaced, its programs are not stored, its steps are too small to be worth a process, or
        another process cannot use the device. `priority`: how it makes way for steps.
        """
        parts, store = source.parts, source.store
        is_able = (
            store is not None
            and store.is_used
            and source.can_be_split
            and parts.shadow is None
            and parts.program_digest == self._digest
            and source.is_host
        )
        return functools.partial(self.compile, priority=priority) if is_able else None

    def compile(
        self, shapes: StepShapes, part: StepKey, *, priority: CompilePriority = "pauses"
    ) -> bool:
        """Compile a part of a step into the store. Returns whether it is there now; False when the
        process cannot make it, so that this one must. `priority`: as that of `of`.

        EndedError after `interrupt`, and when the program ends.
        """
        with self._turn:
            return self._is_able and self._compile(shapes, part, priority)

    def _compile(self, shapes: StepShapes, part: StepKey, priority: CompilePriority) -> bool:
        with self._interrupting:
            self._interrupted.clear()
        try:
            self._worker.start()
            if not self._worker.post(encoded(shapes, part), LIMITS.time_s):
                raise WorkerError("it does not read")
            self._wait(priority)
            reason = bytes(self._worker.take()).decode()
        except (LimitError, WorkerError, EnginebayError, OSError) as error:
            self._check_end()
            reason = f"{type(error).__name__}: {error}"
        if reason:
            what = "steps are compiled in this process and slow down requests: another process"
            log.warning("%s cannot compile %s: %s", what, part, reason)
            self._is_able = False
            self._worker.close()
        return not reason

    def _wait(self, priority: CompilePriority) -> None:
        """Wait for the answer, or the end of the process."""
        is_paused, since_s, pauses = False, -math.inf, priority == "pauses"
        is_nice_set, value = False, 0 if priority == "high" else LOWEST_PRIORITY_NICE
        deadline_s = time.monotonic() + LIMITS.time_s
        while not self._worker.has_answer(POLL_S) and (pid := self._worker.pid) is not None:
            self._check_end()
            is_nice_set = is_nice_set or set_session_nice(pid, value)
            now_s = time.monotonic()
            if now_s > deadline_s:
                return
            if is_paused and (not self._is_busy() or now_s - since_s > PAUSE_S):
                self._worker.pause(is_paused=False)
                is_paused, since_s = False, now_s
            elif pauses and not is_paused and self._is_busy() and now_s - since_s > RUN_S:
                self._worker.pause()
                is_paused, since_s = True, now_s

    @property
    def pid(self) -> int | None:
        """The number of the process; None when there is none."""
        return self._worker.pid

    def interrupt(self) -> None:
        """End the process. A later `compile` starts another one."""
        with self._interrupting:
            self._interrupted.set()
            self._worker.interrupt()

    def rest(self) -> None:
        """End the process, unless it compiles. A later `compile` starts another one."""
        if self._turn.acquire(blocking=False):
            try:
                self._worker.close()
            finally:
                self._turn.release()

    def close(self) -> None:
        """End the process, and wait for its end."""
        self.interrupt()
        self._worker.close()

    def _check_end(self) -> None:
        if self._interrupted.is_set() or not threading.main_thread().is_alive():
            self._worker.close()
            raise EndedError("the compilation was interrupted")
