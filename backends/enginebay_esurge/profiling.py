"""Profiler: a trace of JAX's own profiler over so many scheduler updates of an engine."""

from __future__ import annotations

import threading
from pathlib import Path

import jax

from enginebay.errors import InputError
from enginebay.loop.observer import Ending, Execution, Observer, Update
from enginebay_esurge.errors import BusyError
from enginebay_esurge.service import Service
from enginebay_executor.local import runner_of
from enginebay_startup.folders import make_writable


class Profiler(Observer):
    """Starts a trace, and ends it when so many updates were launched and have run. Safe from
    several threads.

    JAX traces a whole process, so that one trace can be taken at a time.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._lock = threading.Lock()
        self._is_active = False
        self._num_left = 0

    @property
    def is_active(self) -> bool:
        """Whether a trace is being taken."""
        return self._is_active

    def start(
        self,
        output_dir: str | Path,
        num_batches: int,
        host_tracer_level: int | None,
        python_tracer_level: int | None,
    ) -> None:
        """Trace into a folder, which is made. BusyError (a RuntimeError) while a trace is taken;
        then that goes on.

        InputError (a ValueError) for fewer batches than one, and for a folder that cannot be
        written.
        """
        if num_batches < 1:
            raise InputError(
                f"num_batches = {num_batches}", "1 or more", "Say how many updates to trace."
            )
        with self._lock:
            if self._is_active:
                raise _busy("this engine is being profiled")
            make_writable(
                output_dir, "output_dir"
            )  # JAX writes at the end only, and cannot start again when that fails
            options = jax.profiler.ProfileOptions()
            if host_tracer_level is not None:
                options.host_tracer_level = host_tracer_level
            if python_tracer_level is not None:
                options.python_tracer_level = python_tracer_level
            try:
                jax.profiler.start_trace(output_dir, profiler_options=options)
            except RuntimeError as error:
                raise _busy(str(error)) from error
            self._num_left, self._is_active = num_batches, True
            self._service.audience.add(self)

    def stop(self) -> None:
        """End the trace and write it, as far as it is; nothing happens when none is taken."""
        with self._lock:
            if self._is_active:
                self._is_active = False
                self._service.audience.remove(self)
                jax.profiler.stop_trace()

    # The engine's thread.

    def updated(self, update: Update) -> None:
        self._num_left -= 1
        if self._num_left == 0:
            # Before the next update is launched: the trace has these steps whole, and no others.
            jax.block_until_ready(runner_of(self._service.parts.engine).state)
            self.stop()

    def executed(self, execution: Execution) -> None:
        """Updates are counted when they are launched."""

    def ended(self, ending: Ending) -> None:
        """Requests are not counted."""


def _busy(given: str) -> BusyError:
    return BusyError(
        f"a profile asked for, and {given}",
        "one at a time in a process",
        "Wait for it, or call stop_profiling().",
    )
