"""Generators that any thread may close, even while another thread runs them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Generator
from typing import Any, ParamSpec, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
Given = ParamSpec("Given")


class ClosableGenerator(Generator[Item, None, Result]):
    """A generator that runs in one thread at a time. Another thread that requests the next item
    waits.

    Closing it while a thread computes an item lets that call finish; the thread then receives
    StopIteration, and no further call runs.
    """

    def __init__(self, inner: Generator[Item, None, Result]) -> None:
        self._inner = inner
        self._running = threading.Lock()
        self._is_closed = False

    def send(self, value: None) -> Item:
        return self._run(self._inner.send, value)

    def throw(self, *error: Any) -> Item:
        return self._run(self._inner.throw, *error)

    def close(self) -> None:
        self._is_closed = True
        self._close_if_idle()

    def _run(self, step: Callable[..., Item], *arguments: Any) -> Item:
        try:
            with self._running:
                item = step(*arguments)
            if self._is_closed:
                raise StopIteration
            return item
        finally:
            if self._is_closed:  # another thread may have closed it during the step
                self._close_if_idle()

    def _close_if_idle(self) -> None:
        """Close the inner generator, unless a thread runs it: that thread closes it afterwards."""
        if self._running.acquire(blocking=False):
            try:
                self._inner.close()
            finally:
                self._running.release()


def closable(
    make: Callable[Given, Generator[Item, None, Result]],
) -> Callable[Given, Generator[Item, None, Result]]:
    """Decorate a generator function so that any thread may close its generators."""

    @functools.wraps(make)
    def made(*args: Given.args, **kwargs: Given.kwargs) -> Generator[Item, None, Result]:
        return ClosableGenerator(make(*args, **kwargs))

    return made
