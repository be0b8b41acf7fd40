"""Kernels interpreted on the host: Triton's interpreter over NumPy arrays, in a process of its own.

Triton decides when a kernel is decorated whether it will be compiled or interpreted, so one process
cannot do both. The worker process interprets; this one goes on as it was. Arrays lie at addresses
of their own there (see enginebay_triton.interpreter_worker), so that a place outside of them, or a
race between two programs, is found.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.errors import InternalError, UnsupportedError
from enginebay_triton.call import INSTALL, Launch, version
from enginebay_triton.interpreter_worker import read_message, write_message

DTYPES = frozenset({"float16", "float32"})
"""Of floating-point arrays: products of bfloat16 are wrong in Triton's interpreter."""


class KernelFaultError(InternalError):
    """An interpreted kernel read or wrote where it must not, raced, or failed."""


def interpret(kernel: Any, arrays: Sequence[jax.Array], how: Launch) -> tuple[jax.Array, ...]:
    """Run `kernel` by interpretation, inside jit too; a Launcher.

    A fault of the kernel is a KernelFaultError in the call-back, which jit raises as an error of
    its own with that text.
    """
    require()
    dtypes = [array.dtype for array in arrays] + [shape.dtype for shape in how.out]
    narrow = {str(dtype) for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)}
    if not narrow <= DTYPES:
        raise UnsupportedError(
            f"interpreting {', '.join(sorted(narrow - DTYPES))}",
            ", ".join(sorted(DTYPES)),
            "Check other dtypes on a GPU.",
        )
    changed = arrays[len(arrays) - how.num_in_place :]
    shapes = tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in changed)
    place = _place(kernel)
    return tuple(
        jax.pure_callback(functools.partial(_run, place, how), (*shapes, *how.out), *arrays)
    )


def require() -> None:
    """UnsupportedError where Triton is not installed."""
    if version("triton") is None:
        raise UnsupportedError("triton is not installed", "triton 3.6 to 3.9", INSTALL)


def _place(kernel: Any) -> tuple[str, str, str]:
    """(module, file, name) by which the worker finds the kernel."""
    function = kernel.fn
    return function.__module__, inspect.getsourcefile(function) or "", function.__name__


def _run(place: tuple[str, str, str], how: Launch, *arrays: Any) -> tuple[np.ndarray, ...]:
    given = [np.asarray(array) for array in arrays]
    out = [(shape.shape, np.dtype(shape.dtype).name) for shape in how.out]
    return _worker().run((place, how.grid, given, how.num_in_place, out, dict(how.constants)))


@functools.cache
def _worker() -> Worker:
    worker = Worker()
    atexit.register(worker.close)
    return worker


class Worker:
    """The process that interprets; started when it is first needed, and anew when it has died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    @property
    def process_id(self) -> int | None:
        """The process that was started last; None before the first and after the end."""
        process = self._process
        return None if process is None else process.pid

    def run(self, order: Any) -> tuple[np.ndarray, ...]:
        """Results of one launch: (place, grid, arrays, number in place, shapes and dtypes made,
        constants).
        """
        with self._lock:
            process = self._started()
            assert process.stdin is not None, "a pipe"
            assert process.stdout is not None, "a pipe"
            try:
                write_message(process.stdin, order)
                answer = read_message(process.stdout)
            except (OSError, EOFError, pickle.UnpicklingError) as error:
                code = process.poll()
                self._end()
                raise KernelFaultError(
                    f"the interpreter of kernel {order[0][2]} ended with code {code}"
                ) from error
        if isinstance(answer, str):
            raise KernelFaultError(answer)
        return tuple(answer)

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._process is None:
            paths = os.pathsep.join(path for path in sys.path if path)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "enginebay_triton.interpreter_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths},
            )
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None, "both are pipes"
            try:
                pipe.close()
            except OSError:  # it died with something unread
                pass
        process.kill()
        process.wait()
