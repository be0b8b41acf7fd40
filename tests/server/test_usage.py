"""The figures of `usage`: a rate of tokens leaves out the wait for the first token."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from enginebay.outputs import CompletionOutput, RequestMetrics, RequestOutput, StreamChunk
from enginebay_server.usage import Usage
from tests.server.in_process_client import Asker

TEXT = "Tell me about the cat and the sun. " * 8
APIS: dict[str, tuple[dict[str, Any], Callable[[dict[str, Any]], tuple[int, int]]]] = {
    "/v1/completions": (
        {"prompt": TEXT, "max_tokens": 2},
        lambda usage: (usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]),
    ),
    "/v1/chat/completions": (
        {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2},
        lambda usage: (usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]),
    ),
    "/v1/responses": (
        {"input": TEXT, "max_output_tokens": 2},
        lambda usage: (usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]),
    ),
    "/v1/messages": (
        {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2},
        lambda usage: (
            usage["input_tokens"] + usage["cache_read_input_tokens"],
            usage["cache_read_input_tokens"],
        ),
    ),
}
"""A body for each API, and the prompt tokens and cached tokens of its `usage`."""


def last_usage(text: str) -> dict[str, Any]:
    """The last usage in the events of a stream."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line[:6] == "data: "]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    found = [event.get("response", event).get("usage") for event in events]
    return next(usage for usage in reversed(found) if usage)


@pytest.mark.parametrize("path", APIS)
def test_each_api_reports_cached_tokens_in_its_own_field(asker: Asker, path: str) -> None:
    body, counts = APIS[path]
    asker.post(path, body)
    whole = counts(asker.ok(path, **body)["usage"])
    options = {"stream_options": {"include_usage": True}} if "completions" in path else {}
    answer = asker.post(path, {**body, **options, "stream": True})
    assert counts(last_usage(answer.text)) == whole
    num_prompt, num_cached = whole
    assert 0 < num_cached < num_prompt
    asker.llm.run_on_engine(asker.llm.engine.ledger.forget)
    assert counts(asker.ok(path, **body)["usage"]) == (num_prompt, 0)


def test_the_rate_of_an_answer_is_that_of_its_tokens_after_the_first() -> None:
    since_s = time.monotonic() - 30.0
    metrics = RequestMetrics(
        arrival_s=since_s,
        first_token_s=since_s + 20.0,
        finished_s=since_s + 22.0,
        num_generated_tokens=7,
    )
    completion = CompletionOutput(0, "", list(range(7)))
    usage = Usage(since_s=since_s)
    usage.add_output(
        RequestOutput("a", None, [1], [completion], metrics=metrics, num_generated_tokens=7)
    )
    assert usage.record["tokens_per_second"] == pytest.approx(metrics.tokens_per_second) == 3.0
    assert usage.record["processing_time"] >= 30.0


def test_the_rate_of_a_stream_begins_with_its_first_token() -> None:
    usage = Usage(1, since_s=time.monotonic() - 30.0)
    assert usage.record["tokens_per_second"] == 0.0
    usage.add(StreamChunk("a", 0, "", ()))
    usage.add(StreamChunk("a", 0, "x", (1,)))
    assert usage.record["tokens_per_second"] == 0.0
    usage.add(StreamChunk("a", 0, "yz", (2, 3)))
    assert usage.record["tokens_per_second"] > 3 / 30.0, "the 30 s before the first token"
