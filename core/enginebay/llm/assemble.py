"""From token events to text: detokenising and stop texts, on the reader's side of the thread border."""

from __future__ import annotations

import dataclasses
import queue
import time
from collections.abc import Callable, Iterator

from enginebay.loop.messages import Ticket, TokenEvent
from enginebay.text import IncrementalDetokenizer, StopChecker, Tokenizer
from enginebay.types import CompletionOutput, FinishReason, RequestMetrics, StreamChunk


class CompletionReader:
    """Turns the events of one ticket into text; ends the request when a stop text appears.

    `text`, `token_ids` and `logprobs` (None: not asked for) hold all so far. Text that may still become part of a stop
    text, or of a character that is not complete, is held back until it is clear.
    """

    def __init__(self, ticket: Ticket, tokenizer: Tokenizer, abort: Callable[[str], None]) -> None:
        sampling = ticket.request.sampling
        self.ticket = ticket
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, float]] | None = None if sampling.num_logprobs is None else []
        self.cumulative_logprob = 0.0
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self.metrics: RequestMetrics | None = None
        self._hidden = frozenset(sampling.stop_token_ids)
        self._abort = abort
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, skip_special_tokens=sampling.skip_special_tokens
        )
        self._stops = StopChecker(
            sampling.stop, include_stop_str_in_output=sampling.include_stop_str_in_output
        )

    @property
    def done(self) -> bool:
        """Whether the last chunk was returned."""
        return self.finish_reason is not None

    def feed(self, event: TokenEvent) -> StreamChunk | None:
        """The chunk that an event makes, or None when there is nothing to show yet. Raises the event's error."""
        if event.error is not None:
            raise event.error
        if self.done:
            return None
        delta, token_ids = self._take(event)
        if not self.done and event.finish_reason is not None:
            self.finish_reason = event.finish_reason
            self.metrics = event.metrics
            delta += self._finish()
        self.text += delta
        self.token_ids += token_ids
        logprobs = self._take_logprobs(event, len(token_ids))
        if not delta and not token_ids and not self.done:
            return None
        request = self.ticket.request
        return StreamChunk(
            request.parent_id,
            request.index,
            delta,
            tuple(token_ids),
            self.finish_reason,
            self.metrics,
            logprobs,
        )

    def _take(self, event: TokenEvent) -> tuple[str, list[int]]:
        """Text and tokens up to a stop text, if there is one among them."""
        delta = ""
        taken: list[int] = []
        for token_id in event.token_ids:
            taken.append(token_id)
            if token_id in self._hidden:
                continue  # a stop token ends the text and is no part of it
            delta += self._stops.push(self._detokenizer.push([token_id]))
            if self._stops.stopped:
                self._stop(len(self.token_ids) + len(taken), event.metrics)
                break
        return delta, taken

    def _take_logprobs(self, event: TokenEvent, num_tokens: int) -> tuple[dict[int, float], ...] | None:
        """Those of an event's first tokens; None when they were not asked for."""
        if self.logprobs is None:
            return None
        told: tuple[dict[int, float], ...] = ()
        if event.logprobs is not None:
            ids, values = event.logprobs.token_ids[:num_tokens], event.logprobs.values[:num_tokens]
            told = tuple(map(_best_first, ids.tolist(), values.tolist()))
            self.cumulative_logprob = sum(values[:, 0].tolist(), self.cumulative_logprob)
        self.logprobs += told
        return told

    def _stop(self, num_tokens: int, metrics: RequestMetrics | None) -> None:
        """A stop text has come: end the request, and settle its figures as they are now."""
        self.finish_reason = "stop"
        if metrics is not None:
            now_s = time.monotonic()
            self.metrics = dataclasses.replace(metrics, finished_s=now_s, num_generated_tokens=num_tokens)
        self._abort(self.ticket.request.request_id)

    def _finish(self) -> str:
        """What was held back."""
        rest = self._stops.push(self._detokenizer.flush())
        if self._stops.stopped:
            self.finish_reason = "stop"
        return rest + self._stops.flush()

    def completion(self) -> CompletionOutput:
        """All so far, as an output."""
        told = self.logprobs is not None
        return CompletionOutput(
            self.ticket.request.index,
            self.text,
            list(self.token_ids),
            cumulative_logprob=self.cumulative_logprob if told else None,
            logprobs=list(self.logprobs) if self.logprobs is not None else None,
            finish_reason=self.finish_reason,
        )


def _best_first(token_ids: list[int], values: list[float]) -> dict[int, float]:
    """Log-probabilities by token, of a sampled token followed by the best ones: it stands last unless it is one of these."""
    best = dict(zip(token_ids[1:], values[1:], strict=True))
    return {**best, token_ids[0]: best.get(token_ids[0], values[0])}


def announce_in(reader: CompletionReader, arrived: queue.SimpleQueue[CompletionReader]) -> None:
    """Have a reader announced in `arrived` whenever it has events."""
    reader.ticket.listen(lambda: arrived.put(reader))
    arrived.put(reader)  # events that came before the listener did


def waiting_events(reader: CompletionReader) -> Iterator[TokenEvent]:
    """The events that are there now."""
    while True:
        try:
            yield reader.ticket.get_nowait()
        except queue.Empty:
            return
