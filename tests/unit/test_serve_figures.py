"""bench serve: what is read from answers, and the figures of timelines whose times are known."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import re
from typing import Any

import pytest

from enginebay.errors import InputError
from enginebay_bench.serve.bounds import parse_bounds
from enginebay_bench.serve.figures import ClientCost, Summary, make_figures, most_at_once
from enginebay_bench.serve.files import load_table, request_table
from enginebay_bench.serve.run import Measurement
from enginebay_bench.serve.sse import AnswerReader
from enginebay_bench.serve.timeline import RequestTimeline


def event(delta: dict[str, Any] | None = None, **fields: Any) -> bytes:
    choices = [] if delta is None else [{"index": 0, "delta": delta, **fields}]
    top = {} if delta is not None else fields
    return b"data: " + json.dumps({"choices": choices, **top}).encode() + b"\n\n"


USAGE = {"completion_tokens": 7, "prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
CHAT = [
    event({"role": "assistant", "content": ""}),
    event({"reasoning_content": "hm"}),
    event({"content": "Ein Stück"}),
    b": a comment\n\n",
    event({"tool_calls": [{"index": 0, "function": {"name": "f"}}]}),
    event({}, finish_reason="stop"),
    event(usage=USAGE),
    b"data: [DONE]\r\n\r\n",
]


def read(pieces: list[bytes], **options: bool) -> RequestTimeline:
    """The timeline of an answer, of which piece i arrives at second i."""
    timeline = RequestTimeline(0, 0.0)
    reader = AnswerReader(timeline, **options)
    for second, piece in enumerate(pieces):
        reader.feed(piece, float(second))
    reader.end()
    return timeline


def test_a_chunk_is_an_event_with_text_reasoning_or_a_tool_call() -> None:
    timeline = read(CHAT)
    assert timeline.chunk_s == [1.0, 2.0, 4.0]  # neither the role nor the usage is a chunk
    assert (timeline.num_tokens, timeline.token_source) == (7, "usage")
    assert (timeline.num_prompt_tokens, timeline.num_cached_tokens) == (3, 2)
    assert (timeline.finish_reason, timeline.error) == ("stop", None)
    assert timeline.text == []
    assert read(CHAT, keep_text=True).text == ["hm", "Ein Stück"]


def test_an_answer_reads_the_same_in_any_pieces() -> None:
    whole = b"".join(CHAT)
    for size in (1, 3, 17, len(whole)):
        pieces = [whole[at : at + size] for at in range(0, len(whole), size)]
        timeline = read(pieces)
        assert (len(timeline.chunk_s), timeline.num_tokens, timeline.error) == (3, 7, None)
        complete = [whole.index(one) + len(one) - 1 for one in (CHAT[1], CHAT[2], CHAT[4])]
        # Each chunk has the time of the piece with the line break that ends it.
        assert timeline.chunk_s == [float((at - 1) // size) for at in complete]


def test_completions_without_usage_count_a_token_per_chunk() -> None:
    texts = [b'data: {"choices":[{"text":"%s"}]}\n\n' % text for text in (b"a", b"", b"b c")]
    timeline = read([*texts, b"data: [DONE]\n\n"])
    assert (timeline.num_tokens, timeline.token_source) == (2, "chunks")
    assert timeline.chunk_s == [0.0, 2.0]


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        ([event({"content": "a"})], r"without \[DONE\]"),
        ([b'data: {"error": {"message": "out of pages"}}\n\n'], "^out of pages$"),
        ([b"data: [1]\n\n"], "no JSON object"),
        ([b"data: {\n\n", b"data: [DONE]\n\n"], "no JSON object"),
    ],
)
def test_a_broken_answer_is_a_failure(pieces: list[bytes], why: str) -> None:
    timeline = read(pieces)
    assert re.search(why, timeline.error or "")


def answered(index: int, due_s: float, chunks: list[float], tokens: int) -> RequestTimeline:
    return RequestTimeline(
        index, due_s, due_s + 0.001, chunks[-1] + 0.5, chunks, num_tokens=tokens,
        num_prompt_tokens=4, token_source="usage", finish_reason="length",
    )  # fmt: skip


def hundred() -> list[RequestTimeline]:
    """Request i is due at second 10 i. Its first chunk comes after i ms, two more 20 ms apart."""
    found = []
    for i in range(101):
        first = 10.0 * i + i / 1000
        found.append(answered(i, 10.0 * i, [first, first + 0.02, first + 0.04], 5))
    return found


def known(summary: Summary | None) -> Summary:
    assert summary is not None
    return summary


COST = ClientCost(0.101, [0.001, 0.002])


def test_percentiles_are_those_of_the_distribution() -> None:
    f = make_figures(hundred(), COST, rate=0.1)
    ttft = dataclasses.astuple(known(f.ttft_s))
    assert ttft == pytest.approx((0.05, 0.05, 0.09, 0.099, 0.1))  # mean, p50, p90, p99, max
    assert known(f.tpot_s).p50 == pytest.approx(0.01)  # 5 tokens
    assert known(f.itl_s).p50 == pytest.approx(0.02)  # in 3 chunks
    assert known(f.e2e_s).p90 == pytest.approx(0.13)
    assert known(f.lag_s).max == pytest.approx(0.001)
    assert f.duration_s == pytest.approx(1000.64)
    assert f.output_tokens_per_s == pytest.approx(505 / 1000.64)
    assert f.requests_per_s == pytest.approx(101 / 1000.64)
    assert (f.num_chunks, f.num_output_tokens, f.num_prompt_tokens) == (303, 505, 404)
    assert f.client_cpu_us_per_token == pytest.approx(200.0)
    assert (f.tokens_counted_by, f.max_in_flight, f.is_client_slow) == ("usage", 1, False)


def test_latency_counts_from_the_scheduled_time() -> None:
    late = RequestTimeline(0, 1.0, 3.0, 4.0, [3.5], num_tokens=1)
    f = make_figures([late], COST, rate=1.0)
    assert (known(f.ttft_s).p50, known(f.lag_s).p50, f.is_client_slow) == (2.5, 2.0, True)


def test_failures_and_empty_answers_have_no_latency_and_are_counted() -> None:
    failed = RequestTimeline(1, 0.0, 0.0, 9.0, [0.1], num_tokens=1, error="HTTP 500: no")
    empty = RequestTimeline(2, 0.0, 0.0, 2.0, finish_reason="stop")
    good = answered(0, 0.0, [0.1, 0.2], 2)
    f = make_figures([good, failed, empty], COST, concurrency=3, bounds=parse_bounds("ttft=1s", 1))
    assert (f.num_answered, f.num_failed, f.num_empty) == (2, 1, 1)
    assert f.errors == {"HTTP 500: no": 1}
    assert (known(f.ttft_s).max, f.num_output_tokens) == (0.1, 2)
    assert (f.good_share, f.goodput_per_s) == pytest.approx((1 / 3, 1 / 9))
    assert f.finish_reasons == {"length": 1, "stop": 1}


def test_figures_without_any_answer_are_none() -> None:
    f = make_figures([RequestTimeline(0, 0.0, 0.0, 1.0, error="x")], COST, rate=1.0)
    assert (f.ttft_s, f.tpot_s, f.e2e_s, f.client_cpu_us_per_token) == (None,) * 4


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        ("ttft=100ms", True),
        ("ttft=99999us", False),
        ("tpot=10ms", True),
        ("tpot=9.9ms", False),
        ("itl=30ms,ttft=1s", True),
        ("itl=29ms,ttft=1s", False),
        ("e2e=0.14s", True),
        ("e2e=139ms", False),
    ],
)
def test_each_bound_is_held_or_not(slo: str, good: bool) -> None:
    one = answered(0, 0.0, [0.1, 0.11, 0.1399999999], 5)
    assert parse_bounds(slo, 0.9).holds(one) is good


@pytest.mark.parametrize("slo", ["", "ttft", "ttft=5", "ttft=0ms", "ttft=-5ms", "speed=5ms"])
def test_other_bounds_are_refused(slo: str) -> None:
    with pytest.raises(InputError, match="Pass --slo"):
        parse_bounds(slo, 0.9)


def test_spans_that_touch_do_not_overlap() -> None:
    assert most_at_once([(0, 1), (1, 2), (0.5, 3), (math.nan, 1)]) == 2


def test_tables_have_every_load_and_request() -> None:
    timelines = [*hundred()[:3], RequestTimeline(3, 30.0, 30.0, 31.0, error="a, b")]
    measured = [Measurement(make_figures(timelines, COST, rate=2.0), timelines)]
    (load,) = csv.DictReader(io.StringIO(load_table(measured)))
    assert (load["load"], load["num_failed"], load["errors.a, b"]) == ("2/s", "1", "1")
    assert float(load["ttft_s.p50"]) == pytest.approx(0.001)
    rows = list(csv.DictReader(io.StringIO(request_table(measured))))
    assert [float(row["due_s"]) for row in rows] == [0, 10, 20, 30]
    assert rows[2]["ttft_s"] == "0.002000"
    assert (rows[3]["ttft_s"], rows[3]["error"], rows[0]["output_tokens"]) == ("", "a, b", "5")
