"""Compilations: what an engine has compiled, and what it compiles now."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator


@dataclasses.dataclass(slots=True)
class Compilations:
    """The number of programs that an engine has compiled, and the sum of their compile times in
    seconds. While `forbidden` is True, another compilation raises CompilationError.
    `num_running` counts the programs that are being traced or compiled now.
    """

    count: int = 0
    seconds: float = 0.0
    forbidden: bool = False
    num_running: int = 0
    _began_s: float = 0.0
    _lock: threading.Lock = dataclasses.field(
        default_factory=threading.Lock, repr=False, compare=False
    )

    def add(self) -> None:
        """Count one more program. Any thread may call this method."""
        with self._lock:
            self.count += 1

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Add the seconds of a `with` block that traces or compiles. Any thread may call this."""
        began_s = time.monotonic()
        with self._lock:
            self._began_s = self._began_s if self.num_running else began_s
            self.num_running += 1
        try:
            yield
        finally:
            with self._lock:
                self.num_running -= 1
                self.seconds += time.monotonic() - began_s

    @property
    def running_s(self) -> float | None:
        """Seconds since a compilation that is not done began; None while nothing is compiled. Any
        thread may read this.
        """
        with self._lock:
            return time.monotonic() - self._began_s if self.num_running else None
