"""Interprets kernels on the host, with Triton's interpreter over NumPy arrays.

Triton decides whether a kernel is compiled or interpreted when the kernel is decorated, so one
process cannot do both. A worker process interprets. It gives each array an address space of its own
(enginebay_triton.interpreter_worker), which finds accesses outside of an array and races between
programs.
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
from enginebay.waits import wait_for_killed
from enginebay_triton.call import INSTALL, Launch, version
from enginebay_triton.interpreter_worker import receive_value, write_message

DTYPES = frozenset({"float16", "float32"})
"""Floating-point dtypes that can be interpreted. Triton's interpreter multiplies bfloat16 wrongly.
"""


class KernelFaultError(InternalError):
    """An interpreted kernel accessed memory outside of its arrays, had a race, or failed."""


def interpret(kernel: Any, arrays: Sequence[jax.Array], how: Launch) -> tuple[jax.Array, ...]:
    """Interpret `kernel`. This function is a Launcher, and also works inside jit.

    A fault of the kernel raises KernelFaultError. Inside jit, JAX catches this error and raises an
    error of its own with the same text.
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
    """Raise UnsupportedError where Triton is not installed."""
    if version("triton") is None:
        raise UnsupportedError("triton is not installed", "triton 3.6 to 3.9", INSTALL)


def _place(kernel: Any) -> tuple[str, str, str]:
    """Return (module, file, name), by which the worker finds the kernel."""
    function = kernel.fn
    return function.__module__, inspect.getsourcefile(function) or "", function.__name__


def _run(place: tuple[str, str, str], how: Launch, *arrays: Any) -> tuple[np.ndarray, ...]:
    given = [np.asarray(array) for array in arrays]
    out = [(shape.shape, np.dtype(shape.dtype).name) for shape in how.out]
    return _worker().run((place, how.grid, given, how.num_in_place, out, dict(how.constants)))


@functools.cache
def _worker() -> InterpreterWorker:
    worker = InterpreterWorker()
    atexit.register(worker.close)
    return worker


class InterpreterWorker:
    """The process that interprets. It is started at the first launch, and again if it has died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    @property
    def process_id(self) -> int | None:
        """The id of the process, or None while there is none."""
        process = self._process
        return None if process is None else process.pid

    def run(self, order: Any) -> tuple[np.ndarray, ...]:
        """Return the results of one launch.

        `order` is (place, grid, arrays, number of arrays changed in place, shapes and dtypes of
        the outputs, constants).
        """
        with self._lock:
            process = self._started()
            assert process.stdin is not None, "a pipe"
            assert process.stdout is not None, "a pipe"
            try:
                write_message(process.stdin, order)
                answer = receive_value(process.stdout)
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
            except OSError:  # it died before it had read everything
                pass
        process.kill()
        wait_for_killed(process, "Triton's interpreter")
