"""Many prompts at once for asyncio: threads generate, the event loop only hands over."""

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
"""Called on the event loop's thread with how many prompts have ended and how many there are."""

StartPrompt = Callable[
    [Any, SamplingParams, Callable[[], bool]], tuple[PromptText, Generator[str, None, SampleState]]
]

PromptEvent = tuple[int, str, Any]
"""(index of the prompt, "text" | "error" | "final", data)."""


@dataclasses.dataclass(frozen=True)
class Concurrently:
    """One call for many prompts: how a prompt is started, its parameters, and how many run at a
    time.
    """

    start: StartPrompt
    params: SamplingParams
    limit: int
    progress: PromptProgress | None

    def check(self, prompts: Any) -> None:
        """ValueError for arguments that cannot be served."""
        wrong = None
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            wrong = (f"prompts of type {type(prompts).__name__}", "a list of prompts")
        elif isinstance(self.limit, bool) or not isinstance(self.limit, int):
            wrong = (
                f"max_concurrent_requests = {self.limit!r}",
                "an integer; 0 or less for one at a time",
            )
        elif self.progress is not None and not callable(self.progress):
            wrong = (
                f"a progress_callback of type {type(self.progress).__name__}",
                "a function of (done, all)",
            )
        if wrong is not None:
            raise InputError(*wrong, "Correct it.")

    async def gather(self, prompts: Sequence[TextOrMessages]) -> list[PromptOutput]:
        """The outputs in the order of the prompts."""
        outputs: list[PromptOutput] = [PromptOutput()] * len(prompts)
        async with contextlib.aclosing(self.stream(prompts)) as events:
            async for index, kind, data in events:
                if kind == "final":
                    outputs[index] = data
                elif kind == "error":
                    outputs[index] = PromptOutput(error=data, finish_reason="error")
        return outputs

    async def stream(self, prompts: Sequence[TextOrMessages]) -> AsyncGenerator[PromptEvent]:
        """Events as they come, those of one prompt in order; closing it ends what is under way."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[PromptEvent] = asyncio.Queue()
        cancelled = threading.Event()

        def put(event: PromptEvent) -> None:
            with contextlib.suppress(
                RuntimeError
            ):  # the event loop was closed, so nobody reads any more
                loop.call_soon_threadsafe(events.put_nowait, event)

        # No `with`: leaving it would wait for the threads, on the event loop.
        pool = ThreadPoolExecutor(max(1, min(self.limit, len(prompts))), "vinference")
        try:
            for index, prompt in enumerate(prompts):
                pool.submit(self._run, index, prompt, put, cancelled)
            done = 0
            while done < len(prompts):
                event = await events.get()
                if event[1] != "text":
                    done += 1
                    if (
                        self.progress is not None
                    ):  # before the yield: a reader may stop at the last event
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
        """One prompt, on a thread of the pool: always ends with one event that is no text."""
        try:
            text, parts = self.start(prompt, self.params, cancelled.is_set)
            for delta in parts:
                put((index, "text", delta))
            event: PromptEvent = (index, "final", text.output())
        except BaseException as error:  # noqa: BLE001  # the thread's edge: a failing prompt fails alone, and its reader is answered
            event = (index, "error", error_line(error))
        put(event)
