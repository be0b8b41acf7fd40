"""Many prompts at once for asyncio: threads generate, and the event loop only forwards their
events.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from enginebay.errors import InputError, error_line
from enginebay.types import SamplingParams
from enginebay_vinference.prompts import PromptOutput, PromptText, TextOrMessages
from enginebay_vinference.state import SampleState

PromptProgress = Callable[[int, int], None]
"""Called on the event loop's thread with (number of finished prompts, number of prompts)."""

StartPrompt = Callable[
    [Any, SamplingParams, Callable[[], bool]], tuple[PromptText, Generator[str, None, SampleState]]
]

PromptEvent = tuple[int, str, Any]
"""(index of the prompt, "text" | "error" | "final", data)."""


@dataclasses.dataclass(frozen=True)
class Concurrently:
    """One call for many prompts: the function that starts a prompt, the sampling parameters, the
    maximum number of prompts that run at once, and the progress callback.
    """

    start: StartPrompt
    params: SamplingParams
    limit: int
    progress: PromptProgress | None

    def check(self, prompts: Any) -> None:
        """Raise InputError (a ValueError) for wrong arguments."""
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            given = f"prompts of type {type(prompts).__name__}"
            raise InputError(given, "a list of prompts", "Pass [prompt] for a single prompt.")
        if isinstance(self.limit, bool) or not isinstance(self.limit, int):
            given = f"max_concurrent_requests = {self.limit!r}"
            raise InputError(given, "an integer", "Pass 0 to run one prompt at a time.")
        if self.progress is not None and not callable(self.progress):
            given = f"a progress_callback of type {type(self.progress).__name__}"
            raise InputError(given, "a function of (done, all)", "Pass a function, or None.")

    async def gather(self, prompts: Sequence[TextOrMessages]) -> list[PromptOutput]:
        """Return the outputs in the order of the prompts."""
        outputs: list[PromptOutput] = [PromptOutput()] * len(prompts)
        async with contextlib.aclosing(self.stream(prompts)) as events:
            async for index, kind, data in events:
                if kind == "final":
                    outputs[index] = data
                elif kind == "error":
                    outputs[index] = PromptOutput(error=data, finish_reason="error")
        return outputs

    async def stream(self, prompts: Sequence[TextOrMessages]) -> AsyncGenerator[PromptEvent]:
        """Yield events as they arrive, the events of one prompt in order. Closing the generator
        stops the running prompts.
        """
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[PromptEvent] = asyncio.Queue()
        cancelled = threading.Event()

        def put(event: PromptEvent) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop was closed
                loop.call_soon_threadsafe(events.put_nowait, event)

        # No `with` block: its end would wait for the threads and block the event loop.
        pool = ThreadPoolExecutor(max(1, min(self.limit, len(prompts))), "vinference")
        try:
            for index, prompt in enumerate(prompts):
                pool.submit(self._run, index, prompt, put, cancelled)
            done = 0
            while done < len(prompts):
                event = await events.get()
                if event[1] != "text":
                    done += 1
                    # Called before the yield, because a reader may stop at the last event.
                    if self.progress is not None:
                        self.progress(done, len(prompts))
                yield event
        finally:
            cancelled.set()
            pool.shutdown(wait=False, cancel_futures=True)

    def _run(
        self,
        index: int,
        prompt: TextOrMessages,
        put: Callable[[PromptEvent], None],
        cancelled: threading.Event,
    ) -> None:
        """Run one prompt on a thread of the pool. Its last event is always "final" or "error"."""
        try:
            text, parts = self.start(prompt, self.params, cancelled.is_set)
            for delta in parts:
                put((index, "text", delta))
            event: PromptEvent = (index, "final", text.output())
        except BaseException as error:  # noqa: BLE001  # outermost frame of the thread: report the error to the prompt's reader
            event = (index, "error", error_line(error))
        put(event)
