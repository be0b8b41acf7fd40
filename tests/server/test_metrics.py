"""/metrics: Prometheus reads it, and its figures are those of the requests."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.server.in_process_client import HELLO, Asker
from tests.server.raw import RawClient
from tests.server.test_client_disconnects import WAIT_S, num_open, until

if TYPE_CHECKING:
    from enginebay.contracts.cache import Lease


TOKENS_OF_STEPS = ("step_tokens", "step_bucket_tokens")


def samples(asker: Asker) -> dict[str, float]:
    """Every sample by its name and labels but the model's."""
    from prometheus_client.parser import text_string_to_metric_families

    found = {}
    for family in text_string_to_metric_families(asker.get("/metrics").text):
        assert family.documentation
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
            found[sample.name + "".join(f" {k}={v}" for k, v in labels.items())] = sample.value
    return found


@pytest.fixture
def after(asker: Asker) -> dict[str, float]:
    body = {"messages": HELLO, "max_tokens": 9, "ignore_eos": True}
    asker.ok("/v1/chat/completions", **body)
    asker.events("/v1/chat/completions", **body, n=2)
    asker.ok("/v1/chat/completions", **body, stop="How")
    return samples(asker)


def test_tokens_and_requests_are_counted(after: dict[str, float], asker: Asker) -> None:
    num_prompt = len(asker.llm.tokenizer.apply_chat_template(HELLO))
    assert after["enginebay:request_success_total finished_reason=length"] == 3
    assert after["enginebay:request_success_total finished_reason=stop"] == 1
    assert after["enginebay:request_success_total finished_reason=abort"] == 0
    assert after["enginebay:prompt_tokens_total"] == 4 * num_prompt
    assert after["enginebay:generation_tokens_total"] >= 27
    assert after["enginebay:num_requests_running"] == 0
    assert after["enginebay:num_requests_waiting"] == 0
    assert 0 <= after["enginebay:kv_cache_usage_perc"] < 0.1
    assert after["enginebay:compilations_total"] > 0
    assert after["enginebay:compilation_seconds_total"] > 0
    hits = after["enginebay:prefix_cache_hits_total"]
    assert 0 <= hits < after["enginebay:prefix_cache_queries_total"]


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("time_to_first_token_seconds", 4),
        ("e2e_request_latency_seconds", 4),
        ("request_queue_time_seconds", 4),
        ("request_prefill_time_seconds", 4),
        ("request_decode_time_seconds", 4),
        ("request_inference_time_seconds", 4),
        ("request_prompt_tokens", 4),
    ],
)
def test_times_are_counted_by_bucket(after: dict[str, float], name: str, count: int) -> None:
    name = f"enginebay:{name}"
    assert after[f"{name}_count"] == after[f"{name}_bucket le=+Inf"] == count
    assert after[f"{name}_sum"] > 0
    buckets = [value for key, value in after.items() if key.startswith(f"{name}_bucket")]
    assert buckets == sorted(buckets)


TWO = {"prompt": ["Once upon a time", "One day"], "max_tokens": 3, "ignore_eos": True}
CHAT = {"messages": HELLO, "max_tokens": 3, "ignore_eos": True}
MANY = {"n": 3, "temperature": 1, "seed": 1}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
KINDS: list[tuple[str, dict[str, Any], dict[str, int]]] = [
    ("/v1/completions", TWO, {"length": 2}),
    ("/v1/completions", {**TWO, **MANY}, {"length": 6}),
    ("/v1/completions", {**TWO, **MANY, "n": 1, "best_of": 3}, {"length": 2}),
    ("/v1/completions", {**TWO, "stream": True}, {"length": 2}),
    ("/v1/completions", {**TWO, **MANY, "stream": True}, {"length": 6}),
    ("/v1/completions", {**TWO, "max_tokens": 0, "echo": True}, {"length": 2}),
    ("/v1/completions", {**TWO, "stop": ["e"], "stream": True, "max_tokens": 40}, {"stop": 2}),
    ("/v1/chat/completions", CHAT, {"length": 1}),
    ("/v1/chat/completions", {**CHAT, **MANY, "stream": True}, {"length": 3}),
    ("/v1/responses", {"input": "Hello!", "max_output_tokens": 3}, {"length": 1}),
    ("/v1/responses", {"input": "Hello!", "max_output_tokens": 3, "stream": True}, {"length": 1}),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 3, "stream": True}, {"length": 1}),
    ("/v1/completions", {**TWO, "guided_choice": ["yes", "no"], "stream": True}, {"stop": 2}),
    ("/v1/completions", {**TWO, "logprobs": 2, "temperature": 0.5}, {"length": 2}),
    ("/v1/chat/completions", {**CHAT, "tools": TOOLS, "stream": True}, {"length": 1}),
    ("/v1/embeddings", {"input": ["a", "b"]}, {}),
    ("/v1/count_tokens", {"prompt": "a"}, {}),
    ("/v1/messages/count_tokens", {"messages": HELLO}, {}),
    ("/tokenize", {"prompt": "a"}, {}),
    ("/detokenize", {"tokens": [5]}, {}),
    ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/no/such/folder"}, {}),
    ("/v1/unload_lora_adapter", {"lora_name": "a"}, {}),
    ("/v1/completions", {**TWO, "temperature": -1}, {}),
    ("/v1/completions", {**TWO, "prompt": []}, {}),
]


def ends_between(before: dict[str, float], found: dict[str, float]) -> dict[str, float]:
    """Completions by how they ended, between two readings; no counter has gone down."""
    counted = ("_total", "_bucket", "_count", "_sum")
    fallen = {
        name: (value, found[name])
        for name, value in before.items()
        if name.partition(" ")[0].endswith(counted) and found[name] < value
    }
    assert not fallen
    changes = {
        reason: found[name] - before[name]
        for reason in ("stop", "length", "abort", "error")
        for name in [f"enginebay:request_success_total finished_reason={reason}"]
    }
    return {reason: n for reason, n in changes.items() if n}


def test_each_completion_ends_once_and_no_counter_goes_down(asker: Asker) -> None:
    served = Asker(asker.llm, lora_routes=True)
    methods = served.app.openapi()["paths"].items()
    assert {path for path, *_ in KINDS} == {path for path, one in methods if "post" in one}
    before = samples(served)
    for path, body, ends in KINDS:
        served.post(path, body)
        found = samples(served)
        assert ends_between(before, found) == ends, (path, body)
        before = found


def test_no_counter_goes_down_when_a_response_is_deleted(asker: Asker) -> None:
    made = asker.ok("/v1/responses", input="Hello!", max_output_tokens=3)
    before = samples(asker)
    for status in (200, 404):
        [answer] = asker.all(("DELETE", f"/v1/responses/{made['id']}", {}))
        assert answer.status_code == status
        assert ends_between(before, samples(asker)) == {}


LATE: list[tuple[str, dict[str, Any], int]] = [
    ("completions", {**TWO, **MANY}, 6),
    ("completions", {**TWO, **MANY, "n": 1, "best_of": 3}, 2),
    ("chat/completions", {**CHAT, **MANY}, 3),
    ("responses", {"input": "Hello!", "max_output_tokens": 3}, 1),
    ("messages", {"messages": HELLO, "max_tokens": 3}, 1),
]
"""Bodies and the number of their completions. Streams of them are cut off as well."""


@pytest.mark.parametrize("stream", [False, True])
def test_no_counter_goes_down_when_requests_take_too_long(
    asker: Asker, held: None, stream: bool
) -> None:
    hasty = Asker(asker.llm, request_timeout_s=0.3)
    before, num_late = samples(hasty), 0.0
    for path, body, count in LATE:
        if stream and "best_of" in body:
            continue
        answer = hasty.post(f"/v1/{path}", {**body, "stream": stream})
        assert answer.status_code == 504 or (stream and "took longer than" in answer.text)
        found = samples(hasty)
        ends = ends_between(before, found)
        assert ends in ({"abort": count}, {}), path  # on a busy machine it may not have begun
        before, num_late = found, num_late + sum(ends.values())
    assert num_late


def test_no_counter_goes_down_when_clients_leave(asker: Asker) -> None:
    """In the middle of their streams."""

    async def leave(path: str, body: dict[str, Any]) -> None:
        client = RawClient(asker.app, f"/v1/{path}", {**body, "stream": True})
        await client.has_body.wait()
        client.leave()
        async with asyncio.timeout(WAIT_S):
            await client.task
        await until(lambda: num_open(asker) == 0)

    before = samples(asker)
    for path, body, count in LATE:
        limit = "max_output_tokens" if path == "responses" else "max_tokens"
        if "best_of" in body:
            continue
        asyncio.run(leave(path, {**body, limit: 200}))
        found = samples(asker)
        ends = ends_between(before, found)
        assert sum(ends.values()) == count, (path, ends)
        assert ends.get("abort"), (path, ends)
        before = found


def test_times_between_tokens_are_those_of_streams(after: dict[str, float]) -> None:
    """A stream's first tokens have no token before them."""
    count = after["enginebay:inter_token_latency_seconds_count"]
    assert 0 < count <= 2 * 8


def test_pages_are_counted_by_group_and_state(asker: Asker) -> None:
    ledger, prompt = asker.llm.engine.ledger, np.arange(5, dtype=np.int32)

    def pages() -> dict[str, float]:
        found = samples(asker)
        name = "enginebay:kv_cache_group_pages group=full state="
        states = {state: found[name + state] for state in ("held", "shared", "kept", "free")}
        held = states["held"] + states["shared"]
        usage = found["enginebay:kv_cache_group_usage_perc group=full"]
        assert usage == pytest.approx(held / sum(states.values()))
        return states

    before = pages()
    lease: Lease = asker.llm.run_on_engine(lambda: ledger.admit(0, prompt, 6))
    during = pages()
    asker.llm.run_on_engine(lambda: ledger.release(lease))
    assert (before["held"], during["held"], pages()["held"]) == (0, 1, 0)
    assert sum(before.values()) == sum(during.values()) == 32


def test_the_chosen_kernel_of_each_op_is_shown(asker: Asker) -> None:
    shown = {key for key, value in samples(asker).items() if value == 1}
    for setting, kernel in asker.llm.plan.kernels.names.items():
        op, _, phase = setting.partition(".")
        assert f"enginebay:kernel_info kernel={kernel} op={op} phase={phase}" in shown


def test_steps_are_counted_by_bucket_with_their_padding(asker: Asker) -> None:
    """A prompt of 5 tokens runs in the bucket of 64 tokens, a decode in that of 8 rows."""
    asker.ok("/v1/completions", prompt=[5, 6, 7, 8, 9], max_tokens=3, ignore_eos=True)
    found = samples(asker)
    launched, computed = (f"enginebay:{name}_total mode=" for name in TOKENS_OF_STEPS)
    assert found[f"{launched}prefill"] == 5
    assert found[f"{computed}prefill"] == 64
    assert found["enginebay:steps_total context=64 mode=prefill rows=8 tokens=64"] == 1
    decodes = [
        v for k, v in found.items() if k.startswith("enginebay:steps_total") and "decode" in k
    ]
    assert sum(decodes) >= 1
    assert found[f"{launched}decode"] >= 2
    assert found[f"{computed}decode"] == 8 * found[f"{launched}decode"]
