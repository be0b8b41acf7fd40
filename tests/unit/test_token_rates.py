"""Tokens per second are the same figure wherever one is told: of the tokens after the first, over
the time from the first token to the last. No figure counts the wait for the first token.

They differ where the first chunk of an answer has several tokens, whose own times nobody outside
the engine knows: `usage` of a stream leaves these out, and the others all but one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from enginebay.outputs import CompletionOutput, RequestMetrics, RequestOutput, StreamChunk
from enginebay.serving.events import RequestEnded
from enginebay_bench.serve.figures import ClientCost, make_figures
from enginebay_bench.serve.timeline import RequestTimeline
from enginebay_dashinfer.allspark import ResultQueue
from enginebay_server.usage import Usage

ARRIVAL_S = 100.0
FIRST_S = ARRIVAL_S + 30.0
TOKENS_S = [FIRST_S + 0.5 * i for i in range(9)]
"""When each token comes: two a second, after a wait of 30 s."""
RATE = 2.0
Clock = SimpleNamespace
"""Has the time in `now`."""


def metrics() -> RequestMetrics:
    return RequestMetrics(
        arrival_s=ARRIVAL_S,
        first_scheduled_s=ARRIVAL_S + 1,
        first_token_s=TOKENS_S[0],
        finished_s=TOKENS_S[-1],
        num_generated_tokens=len(TOKENS_S),
    )


def of_metrics(_: Clock) -> float:
    return metrics().tokens_per_second


def of_usage(clock: Clock) -> float:
    """The usage of an answer that is not streamed."""
    completion = CompletionOutput(0, "", list(range(len(TOKENS_S))))
    usage = Usage(since_s=ARRIVAL_S)
    usage.add_output(
        RequestOutput(
            "r", "", [1], [completion], metrics=metrics(), num_generated_tokens=len(TOKENS_S)
        )
    )
    clock.now = TOKENS_S[-1] + 60  # it is written later
    return float(usage.record["tokens_per_second"])


def of_streamed_usage(clock: Clock) -> float:
    usage = Usage(since_s=ARRIVAL_S)
    for clock.now in TOKENS_S:
        usage.add(StreamChunk("r", 0, "", (1,)))
    return float(usage.record["tokens_per_second"])


def of_bench_serve(_: Clock) -> float:
    one = RequestTimeline(0, ARRIVAL_S, ARRIVAL_S, TOKENS_S[-1], TOKENS_S, num_tokens=len(TOKENS_S))
    per_token = make_figures([one], ClientCost(0.0, [0.0]), rate=1.0).tpot_s
    assert per_token is not None
    return 1 / per_token.mean


def of_dashinfer(clock: Clock) -> float:
    results = ResultQueue(3, None)
    results.reader = SimpleNamespace(progress=metrics())  # type: ignore[assignment]
    for clock.now in TOKENS_S:
        results.put(StreamChunk("r", 0, "", (1,)))
    clock.now += 60
    results.put(RequestEnded("r"))
    return results.RequestStatInfo()["generate_tps"]


@pytest.mark.parametrize(
    "rate_of",
    [of_metrics, of_usage, of_streamed_usage, of_bench_serve, of_dashinfer],
    ids=["metrics", "usage", "streamed usage", "bench serve", "DashInfer"],
)
def test_tokens_per_second_leave_out_the_wait_for_the_first_token(
    rate_of: Callable[[Clock], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(now=ARRIVAL_S)
    for name in ("time", "monotonic"):
        monkeypatch.setattr(time, name, lambda: clock.now)
    assert rate_of(clock) == pytest.approx(RATE)
