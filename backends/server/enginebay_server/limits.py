"""ConcurrencyLimit: the number of HTTP requests in the engine, and of those that wait for it."""

from __future__ import annotations

import asyncio
import collections

from enginebay_server.errors import ApiError


class ConcurrencyLimit:
    """Places for requests, first come, first served. It belongs to one event loop."""

    def __init__(self, max_concurrency: int, max_queue: int, retry_after_s: int) -> None:
        self._num_free = max_concurrency
        self._max_queue = max_queue
        self._retry_after_s = retry_after_s
        self._waiting: collections.deque[asyncio.Future[None]] = collections.deque()

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a place."""
        return len(self._waiting)

    async def enter(self) -> None:
        """Take a place, or wait for one; ApiError 429 when the queue is full."""
        if self._num_free:
            self._num_free -= 1
            return
        if len(self._waiting) >= self._max_queue:
            raise ApiError(
                429,
                "the server has as many requests as it takes. Send the request again later.",
                code="rate_limit_exceeded",
                retry_after_s=self._retry_after_s,
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()  # the place was given while its client left
            elif turn in self._waiting:  # leave() may have removed it already
                self._waiting.remove(turn)
            raise

    def leave(self) -> None:
        """Give a place back."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1
