"""PageMap: who holds each page of a model's cache, for displays and metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import numpy as np

from enginebay.errors import EnginebayError
from enginebay_server.served import ServedModel

LIMIT_S = 0.5
"""Seconds that a read waits for the engine, which may be compiling."""


class PageMap:
    """The holders of a model's pages, read on the engine's thread. One read runs at a time, because
    the engine answers late while it compiles.

    `latest` is the result of the last read that ended (see `Ledger.page_holders`); None before the
    first.
    """

    def __init__(self, model: ServedModel) -> None:
        self.latest: Mapping[str, np.ndarray] | None = None
        self._llm = model.llm
        self._reading: asyncio.Task[None] | None = None

    async def read(self) -> Mapping[str, np.ndarray] | None:
        """Read the holders of each page by cache group and return `latest`, which is the result of
        an earlier read if the engine is busy.
        """
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read())
        await asyncio.wait({self._reading}, timeout=LIMIT_S)
        return self.latest

    async def _read(self) -> None:
        holders = self._llm.engine.ledger.page_holders
        try:
            self.latest = await asyncio.to_thread(self._llm.run_on_engine, holders)
        except EnginebayError:  # the engine has stopped
            return
