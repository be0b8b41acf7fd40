"""CompletionReader: turns the token events of one completion into text, and finds stop texts."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np

from enginebay.contracts.engine import TokenLogprobs
from enginebay.contracts.text import StopChecker, Tokenizer
from enginebay.outputs import CompletionOutput, RequestMetrics, StreamChunk
from enginebay.serving.running import TokenEvent
from enginebay.text.stopping import SequenceChecker
from enginebay.types import FinishReason, Request

Fed = tuple[int, int, FinishReason | None, RequestMetrics | None]
"""The lengths of a completion's text and token_ids, its finish reason and metrics, at one time."""


MAX_CONTEXT = 64
"""Max tokens of a prompt that are looked at to decode its continuation."""


class CompletionReader:
    """Turns the events of one completion into text, and ends the completion when a stop text
    appears. Belongs to the delivery thread until `done`, except read().

    `text`, `token_ids` and `logprobs` (None: not requested) hold everything so far;
    `prompt_logprobs` arrive with the first token. Text that may still become part of a stop text or
    stop sequence, or that ends in an incomplete character, is held back until more tokens decide
    it.
    """

    def __init__(
        self, request: Request, tokenizer: Tokenizer, abort: Callable[[str], None]
    ) -> None:
        sampling = request.sampling
        self.request = request
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, float]] | None = None if sampling.num_logprobs is None else []
        self.cumulative_logprob = 0.0
        self.prompt_logprobs: list[dict[int, float] | None] | None = None
        self.hidden: np.ndarray | None = None
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self.metrics: RequestMetrics | None = None
        self.progress: RequestMetrics | None = None
        self._fed: Fed = (0, 0, None, None)
        self._read: Fed = self._fed
        self._hidden = frozenset(sampling.stop_token_ids)
        self._tokenizer, self._abort = tokenizer, abort
        self._has_begun = self._is_early = False

    @property
    def done(self) -> bool:
        """Whether the completion has ended."""
        return self.finish_reason is not None

    def feed(self, event: TokenEvent) -> bool:
        """Add an event without an error. Returns whether there is something to read: the event adds
        text or tokens, or it ends the completion.
        """
        if self.finish_reason is not None:
            return False
        self.progress = event.metrics
        params = self.request.sampling.params
        if not self._has_begun:
            self._begin()
        if params.stop or params.stop_words_ids:
            delta, token_ids = self._take(event)
        else:  # nothing but a stop token ends the text
            token_ids = list(event.token_ids)
            shown = [token_id for token_id in token_ids if token_id not in self._hidden]
            delta = self._decoder.push(shown) if shown else ""
        if event.finish_reason is not None and self.finish_reason is None:
            self.finish_reason = event.finish_reason
            self.metrics = event.metrics
            self.hidden = event.hidden
            delta += self._finish()
        self.text += delta
        self.token_ids += token_ids
        if self.logprobs is not None and event.logprobs is not None:
            self._take_logprobs(event.logprobs, len(token_ids))
        if (found := event.prompt_logprobs) is not None:  # the prompt's first token has none
            self.prompt_logprobs = [None, *_best_first(found.token_ids, found.values)]
        has_news = bool(delta or token_ids or self.finish_reason)
        if has_news:  # one assignment, because another thread may read() at the same time
            self._fed = (len(self.text), len(self.token_ids), self.finish_reason, self.metrics)
        return has_news

    def _begin(self) -> None:
        """Make what turns the tokens into text, on the delivery thread."""
        self._has_begun = True
        params = self.request.sampling.params
        self._decoder = self._tokenizer.decoder(
            skip_special_tokens=params.skip_special_tokens, after=_text_before(self.request)
        )
        self._sequences = SequenceChecker(params.stop_words_ids, params.min_tokens)
        self._num_early = params.min_tokens
        self._stops = StopChecker(
            params.stop, include_stop_str_in_output=params.include_stop_str_in_output
        )

    def read(self) -> StreamChunk | None:
        """Return one chunk with all that is new since the last call, or None. One thread at a time
        may call this, while another calls feed().
        """
        (text_from, tokens_from, _, _), fed = self._read, self._fed
        if fed is self._read:
            return None
        self._read = text_to, tokens_to, finish_reason, metrics = fed
        prompt = None if text_from + tokens_from else self.prompt_logprobs
        return StreamChunk(
            request_id=self.request.parent_id,
            index=self.request.index,
            delta_text=self.text[text_from:text_to],
            delta_token_ids=tuple(self.token_ids[tokens_from:tokens_to]),
            finish_reason=finish_reason,
            metrics=metrics,
            logprobs=None if self.logprobs is None else tuple(self.logprobs[tokens_from:tokens_to]),
            prompt_logprobs=None if prompt is None else tuple(prompt),
        )

    def _take(self, event: TokenEvent) -> tuple[str, list[int]]:
        """Text and tokens of an event, cut at the first stop text or stop sequence."""
        if self._num_early <= 0 and not self.request.sampling.params.stop_words_ids:
            before = copy.copy(self._decoder), copy.copy(self._stops)
            delta = self._text_of(event.token_ids)
            if not self._stops.stopped:
                return delta, list(event.token_ids)
            self._decoder, self._stops = before  # again, token by token, to find where it ends
        delta = ""
        taken: list[int] = []
        for token_id in event.token_ids:
            taken.append(token_id)
            delta += self._text_of(self._sequences.push(token_id))
            if self._stops.stopped:
                self._stop(len(self.token_ids) + len(taken), event.metrics)
            if self._stops.stopped or self._sequences.stopped:
                break
        return delta, taken

    def _text_of(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens add. A stop token ends the text and adds none itself."""
        decoder = self._decoder
        if token_ids and self._num_early <= 0:
            self._is_early = False
            shown = [token_id for token_id in token_ids if token_id not in self._hidden]
            return self._stops.push(decoder.push(shown)) if shown else ""
        text = ""
        for token_id in token_ids:
            self._is_early, self._num_early = self._num_early > 0, self._num_early - 1
            if token_id not in self._hidden:
                text += self._stops.push(decoder.push([token_id]), counts=not self._is_early)
        return text

    def _take_logprobs(self, logprobs: TokenLogprobs, num_tokens: int) -> None:
        """Add the log-probabilities of an event's first `num_tokens` tokens."""
        assert self.logprobs is not None, "the request asked for log-probabilities"
        ids, values = logprobs.token_ids[:num_tokens], logprobs.values[:num_tokens]
        self.logprobs += _best_first(ids, values, by_id=self.request.sampling.returns_all)
        self.cumulative_logprob = sum(values[:, 0].tolist(), self.cumulative_logprob)

    def _stop(self, num_tokens: int, metrics: RequestMetrics | None) -> None:
        """A stop text was found: abort the completion in the loop, and set its final metrics."""
        self.finish_reason = "stop"
        if metrics is not None:
            now_s = time.monotonic()
            self.metrics = dataclasses.replace(
                metrics, finished_s=now_s, num_generated_tokens=num_tokens
            )
        self._abort(self.request.request_id)

    def _finish(self) -> str:
        """The text that was held back."""
        decoder, stops = self._decoder, self._stops
        rest = self._text_of(self._sequences.flush()) if self._sequences.holds else ""
        text = decoder.flush()
        if not self.request.sampling.params.stop:
            return rest + text
        rest += stops.push(text, counts=not self._is_early)
        if stops.stopped:
            self.finish_reason = "stop"
        return rest + stops.flush()

    def completion(self) -> CompletionOutput:
        """Everything so far, as a CompletionOutput."""
        return CompletionOutput(
            self.request.index,
            self.text,
            list(self.token_ids),
            cumulative_logprob=None if self.logprobs is None else self.cumulative_logprob,
            logprobs=None if self.logprobs is None else list(self.logprobs),
            finish_reason=self.finish_reason,
        )


def _text_before(request: Request) -> list[int]:
    """The last tokens of the prompt, if the output continues its text. Embeddings have no text."""
    if request.begins_text:
        return []
    ids: list[int] = request.prompt_token_ids[-MAX_CONTEXT:].tolist()
    if request.embeds is not None:
        first = len(request.prompt_token_ids) - len(ids)
        ids = ids[max(0, max(request.embeds.positions) + 1 - first) :]
    return ids


def _best_first(
    token_ids: np.ndarray, values: np.ndarray, *, by_id: bool = False
) -> tuple[dict[int, float], ...]:
    """Log-probabilities by token id, for each row of [tokens, W]. Column 0 is the token itself; the
    best tokens follow, best first. With `by_id` the columns after 0 are in the order of token ids,
    and are sorted here. The token itself comes last, unless it is among the best.
    """
    if by_id:
        order = 1 + np.argsort(-values[:, 1:], axis=1, kind="stable")
        order = np.concatenate([np.zeros_like(order[:, :1]), order], axis=1)
        token_ids, values = (np.take_along_axis(x, order, axis=1) for x in (token_ids, values))
    found = []
    for (own, *ids), (value, *rest) in zip(token_ids.tolist(), values.tolist(), strict=True):
        best = dict(zip(ids, rest, strict=True))
        found.append({**best, own: best.get(own, value)})
    return tuple(found)
