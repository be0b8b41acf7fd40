"""Profiler: records a number of scheduler updates of an engine with JAX's profiler."""

from __future__ import annotations

import threading
from pathlib import Path

import jax

from enginebay.errors import InputError
from enginebay.folders import make_writable
from enginebay.serving.observer import Ending, Execution, Observer, Update
from enginebay_esurge.errors import BusyError
from enginebay_esurge.service import Service
from enginebay_esurge.weights import paged


class Profiler(Observer):
    """Starts a trace, and ends it after the given number of updates was launched and has run.
    Thread-safe.

    JAX traces a whole process, so there can be only one trace at a time.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._lock = threading.Lock()
        self._is_active = False
        self._num_left = 0

    @property
    def is_active(self) -> bool:
        """Whether a trace is being recorded."""
        return self._is_active

    def start(
        self,
        output_dir: str | Path,
        num_batches: int,
        host_tracer_level: int | None,
        python_tracer_level: int | None,
    ) -> None:
        """Trace into a folder, which is created. BusyError (a RuntimeError) while a trace is being
        recorded, which continues.

        InputError (a ValueError) for num_batches < 1, and for a folder that cannot be written.
        """
        if num_batches < 1:
            raise InputError(
                f"num_batches = {num_batches}", "1 or more", "Pass num_batches=10, for example."
            )
        with self._lock:
            if self._is_active:
                raise _busy("this engine is being profiled")
            # JAX writes at the end only, and cannot start another trace if writing fails.
            make_writable(output_dir, "output_dir")
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
        """End the trace and write it. Does nothing without a trace."""
        with self._lock:
            if self._is_active:
                self._is_active = False
                self._service.audience.remove(self)
                jax.profiler.stop_trace()

    # Called on the engine's thread.

    def updated(self, update: Update) -> None:
        self._num_left -= 1
        if self._num_left == 0:
            # Wait before the next update is launched, so that the trace has exactly these steps.
            paged(self._service.parts.engine).executor.wait()
            self.stop()

    def executed(self, execution: Execution) -> None:
        """Does nothing: updates are counted at their launch."""

    def ended(self, ending: Ending) -> None:
        """Does nothing: requests are not counted."""


def _busy(given: str) -> BusyError:
    return BusyError(
        f"a second profile ({given})",
        "one profile at a time per process",
        "Wait for the first profile, or call stop_profiling().",
    )
