"""ConcurrencyLimit: the number of HTTP requests in the engine, and of those that wait for it."""

from __future__ import annotations

import asyncio

from enginebay_server.errors import ApiError


class ConcurrencyLimit:
    """Places for requests, first come, first served. It belongs to one event loop."""

    def __init__(self, max_concurrency: int, max_queue: int, retry_after_s: int) -> None:
        self._places = asyncio.Semaphore(max_concurrency)
        self._max_queue = max_queue
        self._retry_after_s = retry_after_s
        self.num_waiting = 0
        """Requests that wait for a place."""

    async def enter(self) -> None:
        """Take a place, or wait for one; ApiError 429 when the queue is full."""
        if not self._places.locked():
            await self._places.acquire()  # which does not wait
            return
        if self.num_waiting >= self._max_queue:
            raise ApiError(
                429,
                "the server has as many requests as it takes. Send the request again later.",
                code="rate_limit_exceeded",
                retry_after_s=self._retry_after_s,
            )
        self.num_waiting += 1
        try:
            await self._places.acquire()
        finally:
            self.num_waiting -= 1

    def leave(self) -> None:
        """Give a place back."""
        self._places.release()
