"""The values of /metrics: each is computed from what the engine reported, by hand as well."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from enginebay.contracts.engine import RowPlan, StepPlan
from enginebay.outputs import RequestMetrics, StreamChunk
from enginebay.serving.observer import Ending, Execution, Observer, Update
from tests.fakes import make_request
from tests.server.in_process_client import Asker
from tests.server.test_metrics import samples

if TYPE_CHECKING:
    from enginebay.contracts.cache import Lease
    from enginebay_server.decode_rate import PassBytes

NAME = "enginebay:"


def in_buckets(found: dict[str, float], name: str) -> dict[float, float]:
    """The values of a histogram by the upper bound of their bucket, without empty buckets."""
    prefix, before, counts = f"{NAME}{name}_bucket le=", 0.0, {}
    buckets = {float(k.removeprefix(prefix)): v for k, v in found.items() if k.startswith(prefix)}
    for bound in sorted(buckets):
        if buckets[bound] > before:
            counts[bound] = buckets[bound] - before
        before = buckets[bound]
    return counts


@pytest.mark.parametrize(
    ("name", "seconds", "bound"),
    [
        ("request_queue_time_seconds", 0.3, 0.5),
        ("request_prefill_time_seconds", 0.6, 0.75),
        ("time_to_first_token_seconds", 0.9, 1.0),
        ("request_decode_time_seconds", 2.0, 2.5),
        ("request_inference_time_seconds", 2.6, 5.0),
        ("e2e_request_latency_seconds", 2.9, 5.0),
        ("request_time_per_output_token_seconds", 0.2, 0.2),
        ("request_prompt_tokens", 40, 50),
        ("request_generation_tokens", 11, 20),
    ],
)
def test_times_of_a_completion(asker: Asker, name: str, seconds: float, bound: float) -> None:
    """It waits 0.3 s, its prompt takes 0.6 s, and 10 more tokens take 2 s."""
    observer = asker.state.metrics.of["demo"].engine
    times = RequestMetrics(100.0, 100.3, 100.9, 102.9, 40, 16, 11)
    observer.ended(Ending(make_request("timed"), "length", times))
    found = samples(asker)
    assert in_buckets(found, name) == {bound: 1}
    assert found[f"{NAME}{name}_sum"] == pytest.approx(seconds)


def test_counters_add_up_what_the_engine_reports(asker: Asker) -> None:
    observer = asker.state.metrics.of["demo"].engine
    for drafted, accepted in ((3, 2), (4, 0)):
        observer.executed(
            Execution(
                time.monotonic(),
                0.1,
                1,
                accepted + 1,
                num_not_finite=accepted // 2,
                num_drafts=1,
                num_draft_tokens=drafted,
                num_accepted_tokens=accepted,
            )
        )
        observer.updated(Update(time.monotonic(), 0.1, 0.1, 1, 1, 2, 0, 1, 0))
    observer.ended(Ending(make_request("one"), "stop", RequestMetrics(1, 2, 3, 4, 40, 16, 5)))
    tiers = RequestMetrics(1, 2, 3, 4, 10, 9, 5, num_host_tokens=6, num_disk_tokens=2)
    observer.ended(Ending(make_request("two"), "stop", tiers))
    found = samples(asker)
    assert found[f"{NAME}spec_decode_num_drafts_total"] == 2
    assert found[f"{NAME}spec_decode_num_draft_tokens_total"] == 7
    assert found[f"{NAME}spec_decode_num_accepted_tokens_total"] == 2
    assert found[f"{NAME}non_finite_logits_total"] == 1
    assert found[f"{NAME}generation_tokens_total"] == 4
    assert found[f"{NAME}num_preemptions_total"] == 4
    assert found[f"{NAME}prompt_tokens_total"] == 50
    assert found[f"{NAME}prefix_cache_queries_total"] == 50
    assert found[f"{NAME}prefix_cache_hits_total"] == 25
    assert found[f"{NAME}prefix_cache_host_hits_total"] == 6
    assert found[f"{NAME}prefix_cache_disk_hits_total"] == 2
    assert in_buckets(found, "iteration_tokens_total") == {1: 1, 8: 1}
    compilations = asker.llm.engine.compilations
    assert found[f"{NAME}compilations_total"] == compilations.count
    assert found[f"{NAME}compilation_seconds_total"] == compilations.seconds


def test_tokens_of_a_stream_share_the_time_since_the_chunk_before(asker: Asker) -> None:
    from enginebay_server.generation import Generation

    async def count() -> None:
        generation = Generation(
            asker.model,
            asker.state.metrics.of["demo"],
            asker.state.limit,
            asker.state.lanes.small,
            "c-",
        )
        for num_tokens, at_s in ((3, 10.0), (0, 10.3), (4, 10.7), (1, 11.05)):
            chunk = StreamChunk("c-0", 0, "", tuple(range(num_tokens)))
            generation._count_chunk(chunk, at_s)

    asyncio.run(count())
    found = samples(asker)
    assert in_buckets(found, "inter_token_latency_seconds") == {0.2: 4, 0.4: 1}
    assert found[f"{NAME}inter_token_latency_seconds_sum"] == pytest.approx(1.05)


def test_prefix_hits_are_the_cached_tokens_of_the_answer(asker: Asker) -> None:
    prompt = [7 + i % 50 for i in range(150)]
    asker.ok("/v1/completions", prompt=prompt, max_tokens=1)
    before = samples(asker)
    usage = asker.ok("/v1/completions", prompt=prompt, max_tokens=1)["usage"]
    after = samples(asker)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached >= 64
    for name, more in (("prefix_cache_hits", cached), ("prefix_cache_queries", 150)):
        assert after[f"{NAME}{name}_total"] - before[f"{NAME}{name}_total"] == more


class Blocking(Observer):
    """Stops the engine's thread after a decision, from the time when `rows` requests run."""

    def __init__(self, rows: int) -> None:
        self.rows, self.go_on, self.is_waiting = rows, threading.Event(), threading.Event()

    def updated(self, update: Update) -> None:
        if update.num_running == self.rows:
            self.is_waiting.set()
            self.go_on.wait(60)

    def executed(self, execution: Execution) -> None: ...

    def ended(self, ending: Ending) -> None: ...


def test_running_waiting_and_queued_requests(asker: Asker) -> None:
    """Of 12 requests two wait for a place in the engine, and two of the others for a row."""
    import httpx

    from enginebay_server.app import create_app
    from enginebay_server.settings import ServerSettings

    app = create_app([asker.model], ServerSettings(max_concurrency=10))
    blocking = Blocking(rows=8)
    asker.llm.loop.observers.add(blocking)
    body = {"model": "demo", "prompt": [5, 6, 7], "max_tokens": 40, "ignore_eos": True}

    async def send() -> str:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://server", timeout=60
        ) as client:
            requests = [
                asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(12)
            ]
            await asyncio.to_thread(blocking.is_waiting.wait, 60)
            while asker.llm.counts().waiting < 2:
                await asyncio.sleep(0.01)
            text = (await client.get("/metrics")).text
            blocking.go_on.set()
            assert {one.status_code for one in await asyncio.gather(*requests)} == {200}
            return text

    try:
        lines = asyncio.run(send()).splitlines()
    finally:
        blocking.go_on.set()
        asker.llm.loop.observers.remove(blocking)
    assert f'{NAME}num_requests_running{{model_name="demo"}} 8.0' in lines
    assert f'{NAME}num_requests_waiting{{model_name="demo"}} 2.0' in lines
    assert f"{NAME}http_requests_queued 2.0" in lines


def test_cache_usage_is_the_reserved_part(asker: Asker) -> None:
    ledger = asker.llm.engine.ledger
    free = asker.llm.run_on_engine(lambda: ledger.num_free_tokens)
    prompt = np.arange(5, dtype=np.int32)
    lease: Lease | None = asker.llm.run_on_engine(lambda: ledger.admit(0, prompt, 128))
    assert lease is not None
    found = samples(asker)[f"{NAME}kv_cache_usage_perc"]
    asker.llm.run_on_engine(lambda: ledger.release(lease))
    assert found == pytest.approx(128 / free)


def test_decode_steps_have_their_rate_and_the_memory_its_roofline(asker: Asker) -> None:
    """Two passes over rows of 10 and 20 cached tokens read the weights twice, and 11 + 12 + 21 + 22
    tokens. A prefill and a verify step do not count.
    """
    from enginebay_server.decode_rate import ROOFLINE

    model, memory = asker.llm.plan.model, asker.llm.engine.memory
    token_bytes = 2 * 6 * 2 * 32 * 4  # keys and values of 6 layers with 2 heads of 32 floats
    assert not any("lm_head" in path for path in model.weight_specs()), "the table is the head"
    read = 2 * memory.weights_bytes + (11 + 12 + 21 + 22) * token_bytes
    observer = asker.state.metrics.of["demo"].engine
    plan = StepPlan(tuple(row(number, length) for number, length in ((0, 10), (1, 20))), 2)
    now_s = time.monotonic()
    observer.executed(Execution(now_s, 0.004, 2, 4, plan=plan, num_passes=2))
    observer.executed(Execution(now_s, 5.0, 2, 4, plan=plan))
    observer.executed(Execution(now_s - 61, 5.0, 2, 4, plan=plan, num_passes=2))
    found = samples(asker)
    rate = found[f"{NAME}decode_achieved_gigabytes_per_second"]
    assert rate == pytest.approx(read / 0.004 / 1e9)
    roofline = found[f"{NAME}memory_roofline_gigabytes_per_second"]
    assert roofline == (ROOFLINE.known(asker.llm.plan) or 0) / 1e9 > 0.1


def row(number: int, num_cached: int) -> RowPlan:
    from enginebay.contracts.cache import Lease

    return RowPlan(number, Lease(number, 64), num_cached, 1, samples=True)


def test_steps_of_requests_have_a_rate(asker: Asker) -> None:
    assert samples(asker)[f"{NAME}decode_achieved_gigabytes_per_second"] == 0
    asker.ok("/v1/completions", prompt=[5, 6, 7, 8, 9], max_tokens=20, ignore_eos=True)
    decodes = asker.state.metrics.of["demo"].engine.decodes
    assert sum(passes for _, _, passes, _ in decodes._steps) == 19
    assert samples(asker)[f"{NAME}decode_achieved_gigabytes_per_second"] > 0


def make_bytes(experts_per_row: int | None) -> PassBytes:
    from enginebay_server.decode_rate import PassBytes

    return PassBytes(1000.0, 800.0, 8, experts_per_row, [(10.0, float("inf")), (3.0, 4.0)], 7.0)


@pytest.mark.parametrize(
    ("experts_per_row", "lengths", "read"),
    [
        (2, [9], 1000 + 200 + 10 * 10 + 3 * 4 + 7),
        (2, [9, 0], 1000 + 400 + 10 * 11 + 3 * 5 + 14),
        (2, [9] * 5, 1000 + 800 + 5 * (10 * 10 + 3 * 4 + 7)),
        (None, [9], 1000 + 800 + 10 * 10 + 3 * 4 + 7),
    ],
)
def test_a_pass_reads_chosen_experts_and_no_more_than_a_window(
    experts_per_row: int | None, lengths: list[int], read: float
) -> None:
    assert make_bytes(experts_per_row).of_passes(1, lengths) == read
