"""Reads the server-sent events of one streamed answer into its timeline."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from enginebay.errors import shown_text
from enginebay_bench.serve.timeline import RequestTimeline

DONE = b"[DONE]"
PIECES = ("content", "reasoning_content", "reasoning")
"""Fields of a chat delta that hold text; tool calls are counted beside them."""


class AnswerReader:
    """Takes the bytes of an answer as they arrive.

    A chunk is an event with text, reasoning or a tool call. Its time is that of the bytes that
    complete its line. The event that only names the role, or only has `usage`, is no chunk.
    `keep_text` keeps the text, for a tokenizer.
    """

    def __init__(self, timeline: RequestTimeline, *, keep_text: bool = False) -> None:
        self._timeline = timeline
        self._keep_text = keep_text
        self._rest = b""
        self._is_done = False

    def feed(self, data: bytes, now_s: float) -> None:
        """Read `data`, which arrived at `now_s`. It may end in the middle of an event."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now_s)

    def end(self) -> None:
        """The stream has ended. It was cut short if it had neither [DONE] nor a finish_reason."""
        timeline = self._timeline
        if timeline.error is None and not self._is_done and timeline.finish_reason is None:
            timeline.error = "the stream ended without [DONE] or a finish_reason"

    def _event(self, payload: bytes, now_s: float) -> None:
        if payload == DONE:
            self._is_done = True
            return
        try:
            event = json.loads(payload)
        except (ValueError, RecursionError):
            event = None
        if not isinstance(event, dict):
            text = payload[:60].decode(errors="replace")
            self._fail(f"an event that is no JSON object: {shown_text(text)}")
            return
        if event.get("error"):
            self._fail(error_text(event))
            return
        usage = event.get("usage")
        if isinstance(usage, dict):
            self._usage(usage)
        for choice in event.get("choices") or ():
            self._choice(choice, now_s)

    def _choice(self, choice: Mapping[str, Any], now_s: float) -> None:
        timeline = self._timeline
        if choice.get("finish_reason"):
            timeline.finish_reason = str(choice["finish_reason"])
        delta = choice.get("delta")
        if delta is None:
            texts = [choice.get("text")]
        else:
            texts = [delta.get(name) for name in PIECES]
        pieces = [text for text in texts if text]
        if pieces or (delta and delta.get("tool_calls")):
            timeline.chunk_s.append(now_s)
            if self._keep_text:
                timeline.text += pieces
            if timeline.token_source == "chunks":
                timeline.num_tokens += 1

    def _usage(self, usage: Mapping[str, Any]) -> None:
        timeline = self._timeline
        count = usage.get("completion_tokens")
        if isinstance(count, int):
            timeline.num_tokens, timeline.token_source = count, "usage"
        if isinstance(usage.get("prompt_tokens"), int):
            timeline.num_prompt_tokens = usage["prompt_tokens"]
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
            timeline.num_cached_tokens = details["cached_tokens"]

    def _fail(self, why: str) -> None:
        if self._timeline.error is None:
            self._timeline.error = why


def error_text(body: object) -> str:
    """The message of an error body in OpenAI's format; the body itself in another format."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message") if isinstance(error, dict) else None
    return shown_text(str(message or error), 160)
