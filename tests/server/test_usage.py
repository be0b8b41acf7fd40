"""The figures of `usage`: a rate of tokens leaves out the wait for the first token."""

from __future__ import annotations

import time

import pytest

from enginebay.outputs import CompletionOutput, RequestMetrics, RequestOutput, StreamChunk
from enginebay_server.usage import Usage


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
