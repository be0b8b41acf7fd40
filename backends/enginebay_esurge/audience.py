"""Audience: the observers of a service, whose loops come and go."""

from __future__ import annotations

import threading

from enginebay.loop.observer import Observer, Observers


class Audience:
    """Has every loop of a service tell the same observers. Any thread may call, the engine's and an
    observer too.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._observers: tuple[Observer, ...] = ()
        self._loop_observers: Observers | None = None

    def __len__(self) -> int:
        """How many observers there are."""
        return len(self._observers)

    def follow(self, observers: Observers) -> None:
        """Have the observers told by another loop from now on."""
        with self._lock:
            self._loop_observers = observers
            for observer in self._observers:
                observers.add(observer)

    def add(self, observer: Observer) -> None:
        """One more is told."""
        with self._lock:
            self._observers = (*self._observers, observer)
            if self._loop_observers is not None:
                self._loop_observers.add(observer)

    def remove(self, observer: Observer) -> None:
        """One is told nothing any more; a stranger is left alone."""
        with self._lock:
            self._observers = tuple(one for one in self._observers if one is not observer)
            if self._loop_observers is not None:
                self._loop_observers.remove(observer)
