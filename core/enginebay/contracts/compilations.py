"""Compilations: what an engine has compiled, compiles now and compiles later."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Iterator

from enginebay.contracts.step_key import StepKey


@dataclasses.dataclass(slots=True)
class Compilations:
    """The number of programs that an engine has compiled, and the sum of their compile times in
    seconds. While `forbidden` is True, another compilation raises CompilationError.
    `num_running` counts the programs that are being traced or compiled now.

    `coming`: the steps whose programs are compiled beside the requests and are not there yet, next
    first. `stand_ins` counts steps that ran as another step, or in several parts of it, because
    their own program was still coming, by (step, other step). The engine's thread writes it.
    """

    count: int = 0
    seconds: float = 0.0
    forbidden: bool = False
    num_running: int = 0
    coming: tuple[StepKey, ...] = ()
    stand_ins: Counter[tuple[StepKey, StepKey]] = dataclasses.field(default_factory=Counter)
    _began_s: float = 0.0
    _lock: threading.Lock = dataclasses.field(
        default_factory=threading.Lock, repr=False, compare=False
    )

    def add(self) -> None:
        """Count one more program. Any thread may call this method."""
        with self._lock:
            self.count += 1

    def came(self, key: StepKey) -> None:
        """Note that the program of a step is there, or cannot be compiled. Any thread may call
        this method.
        """
        with self._lock:
            self.coming = tuple(one for one in self.coming if one != key)

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
