"""Large bodies: every field has a limit that is checked by its length, and their work waits in a
lane of its own.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginebay_server import json_bodies
from enginebay_server.api_fields import OTHER_FIELDS
from enginebay_server.chat import ChatBody
from enginebay_server.errors import ApiError
from enginebay_server.field_limits import MAX_MESSAGES
from enginebay_server.ingress import MAX_BUFFERED_BODIES
from enginebay_server.json_bodies import check_values, num_values, read_body
from enginebay_server.lanes import LARGE_BYTES, Lane
from tests.server.hostile_bodies import ADAPTER_BASES, BASES, hostile_bodies
from tests.server.in_process_client import HELLO, Asker

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
JSON = {"content-type": "application/json"}
PROMPT_TEXTS = {"prompt", "input", "instructions", "system"}
"""Texts that are limited by the model's context, not by a number of characters."""
FREE_TEXTS = {"guided_json", "guided_regex", "guided_grammar", "suffix"}
"""Texts that the workers of constraints limit, or that are refused whatever they are."""


def schemas(asker: Asker) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Path, name and schema of every field of every body in the server's document."""
    document = Asker(asker.llm, lora_routes=True).app.openapi()
    for path in (*BASES, *ADAPTER_BASES):
        content = document["paths"][path]["post"]["requestBody"]["content"]
        name = content["application/json"]["schema"]["$ref"].rpartition("/")[2]
        for field, schema in document["components"]["schemas"][name]["properties"].items():
            yield path, field, schema


def test_the_bodies_of_these_tests_are_those_of_every_path_that_takes_one(asker: Asker) -> None:
    document = Asker(asker.llm, lora_routes=True).app.openapi()
    posted = {path for path, methods in document["paths"].items() if "post" in methods}
    assert posted == {*BASES, *ADAPTER_BASES}


def test_every_list_and_every_name_has_a_limit(asker: Asker) -> None:
    found = set()
    for path, field, schema in schemas(asker):
        for branch in schema.get("anyOf", schema.get("oneOf", [schema])):
            if branch.get("type") == "array":
                assert "maxItems" in branch, (path, field)
                found.add(field)
            if branch.get("type") == "string" and "const" not in branch and "enum" not in branch:
                is_free = field in PROMPT_TEXTS | FREE_TEXTS
                is_free |= field in ("stop", "tool_choice", "title")
                assert "maxLength" in branch or is_free, (path, field)
    assert {"messages", "stop", "bad_words", "allowed_token_ids", "tokens", "tools"} <= found


@pytest.mark.parametrize(
    ("field", "most"),
    [
        ("stop", 128),
        ("stop_token_ids", 1024),
        ("allowed_token_ids", 2**20),
        ("bad_words", 256),
        ("guided_choice", 2**17),
        ("messages", 16_384),
        ("tools", 128),
    ],
)
def test_a_list_is_refused_by_its_length_before_its_items_are_read(
    asker: Asker, field: str, most: int
) -> None:
    wrong = [None] * (most + 1)  # no item is right, and none is looked at
    wide = Asker(asker.llm, max_body_values=2**22)
    error = wide.refused(CHAT, 400, **{"messages": HELLO, field: wrong})
    assert error["param"].startswith(field)
    assert f"at most {most} items" in error["message"]


@pytest.mark.parametrize("field", ["logit_bias"])
def test_an_object_is_refused_by_its_length(asker: Asker, field: str) -> None:
    error = asker.refused(
        CHAT, 400, messages=HELLO, **{field: dict.fromkeys(map(str, range(1025)))}
    )
    assert (error["param"], "at most 1024" in error["message"]) == (field, True)


def test_texts_are_refused_by_their_length(asker: Asker) -> None:
    long = "a" * (2**20 + 1)
    for path, body in (
        (COMPLETIONS, {"prompt": long}),
        (COMPLETIONS, {"prompt": ["a", long]}),
        ("/v1/embeddings", {"input": long}),
        ("/tokenize", {"prompt": long}),
        ("/v1/count_tokens", {"prompt": long}),
        (CHAT, {"messages": [{"role": "user", "content": long}]}),
        ("/v1/responses", {"input": long}),
        ("/v1/messages", {"messages": [{"role": "user", "content": long}], "max_tokens": 1}),
    ):
        answer = asker.post(path, body)
        assert answer.status_code == 400, path
        assert "at most 1048576" in answer.text, path
    assert asker.refused(CHAT, 400, messages=HELLO, stop=["a" * 4097])["param"] == "stop.0"
    assert asker.refused(CHAT, 400, messages=HELLO, stop="a" * 4097)["param"] == "stop"
    assert asker.refused(CHAT, 400, messages=HELLO, user="a" * 1025)["param"] == "user"


UNREAD = set(OTHER_FIELDS.ignored)
"""Fields of the APIs that change nothing, whatever their value is."""


def test_bodies_about_adapters_are_refused_before_anything_is_loaded(
    asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_to_all = Asker(asker.llm, lora_routes=True)
    called: list[object] = []
    for name in ("load_adapter", "unload_adapter"):
        monkeypatch.setattr(asker.llm, name, lambda *given: called.append(given))
    document, seen = open_to_all.app.openapi(), set()
    for path, what, body in hostile_bodies(document, 2**16, ADAPTER_BASES):
        field = what.partition(" ")[0]
        if field in UNREAD:
            continue
        answer = open_to_all.post(path, content=body, headers=JSON)
        assert answer.status_code in (400, 404, 413), (path, what, answer.text[:200])
        assert len(answer.content) < 2000, (path, what)
        seen.add((path, field))
    assert not called
    assert {(path, "lora_name") for path in ADAPTER_BASES} < seen


def test_a_wrong_body_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reading holds the GIL: only a body that orjson cannot read is read again."""
    read: list[object] = []
    loads = json.loads

    def noted(text: str) -> object:
        read.append(None)
        return loads(text)

    monkeypatch.setattr(json_bodies.json, "loads", noted)

    def refusal(**fields: object) -> str:
        with pytest.raises(ApiError) as caught:
            read_body(ChatBody, json.dumps({"messages": HELLO, **fields}).encode(), 1000)
        return str(caught.value)

    assert "user" in refusal(user=[[]] * 300)
    assert "seed" in refusal(seed="a")
    assert not read
    assert "a valid integer" not in refusal(n=-(10**30)), "it is an integer, but too small"
    assert len(read) == 1
    read_body(ChatBody, b'{"messages":[{"role":"user","content":"\\ud800"}]}', 1000)
    assert len(read) == 2


def test_a_prompt_of_too_many_ids_is_refused_before_they_are_read(asker: Asker) -> None:
    error = asker.refused(COMPLETIONS, 400, prompt=[10**9] * 300)
    assert error["code"] == "context_length_exceeded"


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='a"\\,[{:\n\ud7ff'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='k"\\,{['), inner),
)


def count_of(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(count_of, inner))


def num_empty(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(map(num_empty, inner)) + (isinstance(value, list | dict) and not value)


@settings(max_examples=100, deadline=None)
@given(JSON_VALUES)
def test_values_are_counted_without_making_them(value: Any) -> None:
    for data in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=1)):
        # An empty list or object is counted as one that has an item.
        assert num_values(data.encode()) == count_of(value) + num_empty(value)


def test_commas_of_texts_are_no_values() -> None:
    check_values(json.dumps({"prompt": ',[{"' * 1000}).encode(), 100)


def test_too_many_values_are_refused_before_the_body_is_parsed(asker: Asker) -> None:
    small = Asker(asker.llm, max_body_values=1000)
    answer = small.post(CHAT, content=b"[" * 1001, headers=JSON)  # which is no JSON at all
    assert answer.status_code == 400
    assert "--max-body-values" in answer.json()["error"]["message"]


def test_bodies_are_utf_8() -> None:
    from enginebay_server.chat import ChatBody

    with pytest.raises(ApiError, match="not valid JSON"):
        read_body(ChatBody, json.dumps({"messages": HELLO}).encode("utf-16"), 1000)


def test_a_small_request_does_not_wait_for_large_ones(asker: Asker) -> None:
    """The lane of large requests is held: large bodies wait, and nothing else does."""
    held = threading.Event()
    large = json.dumps({"prompt": "a " * LARGE_BYTES}).encode()

    async def run() -> list[int]:
        transport = httpx.ASGITransport(asker.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            lane = asker.state.lanes.large
            holding = asyncio.create_task(lane.run(held.wait))
            waiting = [
                asyncio.create_task(client.post(path, content=large, headers=JSON))
                for path in ("/tokenize", COMPLETIONS, "/v1/count_tokens", CHAT)
            ]
            try:
                alive = await client.get("/liveness")
                chat = await client.post(CHAT, json={"messages": HELLO, "max_tokens": 1})
                count = await client.post("/tokenize", json={"prompt": "a"})
                assert not any(task.done() for task in waiting)
            finally:
                held.set()
            await holding
            answers = await asyncio.gather(*waiting)
            return [one.status_code for one in (alive, chat, count, *answers)]

    assert asyncio.run(run()) == [200, 200, 200, 200, 400, 200, 400]


def test_bodies_that_wait_are_bounded_together(asker: Asker) -> None:
    """The lane of large requests is held, so that each body stays until the lane goes on."""
    served = Asker(asker.llm, max_body_bytes=LARGE_BYTES + 1024)
    held, large = threading.Event(), b'{"prompt": "' + b"a" * LARGE_BYTES + b'"}'

    async def run() -> list[int]:
        transport = httpx.ASGITransport(served.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            holding = asyncio.create_task(served.state.lanes.large.run(held.wait))

            async def send() -> int:
                return (await client.post("/tokenize", content=large, headers=JSON)).status_code

            waiting = [asyncio.create_task(send()) for _ in range(MAX_BUFFERED_BODIES + 4)]
            while not any(task.done() for task in waiting):
                await asyncio.sleep(0.01)
            held.set()
            await holding
            return list(await asyncio.gather(*waiting))

    statuses = asyncio.run(run())
    assert set(statuses) == {200, 429}
    assert statuses.count(429) <= 4
    assert served.state.body_bytes == 0
    served.state.close()


def test_a_slow_grammar_and_a_slow_adapter_hold_up_no_chat(asker: Asker) -> None:
    held = threading.Event()

    async def run() -> int:
        transport = httpx.ASGITransport(asker.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            lanes = asker.state.lanes
            holding = [
                asyncio.create_task(lane.run(held.wait))
                for lane in (lanes.guided, lanes.adapters, lanes.files)
                for _ in range(40)  # more than any pool has threads
            ]
            try:
                chat = await client.post(CHAT, json={"messages": HELLO, "max_tokens": 1})
            finally:
                held.set()
            await asyncio.gather(*holding)
            return chat.status_code

    assert asyncio.run(run()) == 200


def test_tokenising_lets_other_threads_run(asker: Asker) -> None:
    tokenizer, text = asker.llm.tokenizer, "a " * 200_000
    token_ids = tokenizer.encode(text)
    for work in (lambda: tokenizer.encode(text), lambda: tokenizer.decode(token_ids * 4)):
        begun, done, seen = threading.Event(), threading.Event(), 0

        def run(work: Any = work, begun: Any = begun, done: Any = done) -> None:
            begun.set()
            work()
            done.set()

        thread = threading.Thread(target=run)
        thread.start()
        begun.wait()
        while not done.is_set():
            seen += 1  # never, while the GIL is held
        thread.join()
        assert seen


def test_a_cancelled_call_is_left_out() -> None:
    async def run() -> list[int]:
        lane, held, done = Lane("test"), threading.Event(), list[int]()
        first = asyncio.create_task(lane.run(held.wait))
        await asyncio.sleep(0)
        second = asyncio.create_task(lane.run(done.append, 2))
        third = asyncio.create_task(lane.run(done.append, 3))
        await asyncio.sleep(0)
        second.cancel()
        held.set()
        await asyncio.gather(first, third)
        lane.close()
        return done

    assert asyncio.run(run()) == [3]


def test_an_exception_of_a_lane_is_that_of_its_caller() -> None:
    async def run() -> None:
        lane = Lane("test")
        with pytest.raises(ZeroDivisionError):
            await lane.run(lambda: 1 // 0)
        lane.close()

    asyncio.run(run())


HOLDING = """
import asyncio, threading, time
from enginebay_server.lanes import Lane

async def run():
    lane = Lane("test")
    task = asyncio.ensure_future(lane.run(threading.Event().wait))
    await asyncio.sleep(0)
    task.cancel()

asyncio.run(run())
print("ended")
"""


def test_a_thread_that_hangs_does_not_keep_the_process() -> None:
    command = [sys.executable, "-c", HOLDING]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "ended\n"


LISTED: dict[str, Any] = {"type": "text", "text": "a"}
CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
NESTED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": [{"role": "user", "content": [LISTED]}]}, "content"),
    (CHAT, {"messages": [*HELLO, {"role": "assistant", "tool_calls": [CALL]}]}, "tool_calls"),
    (
        CHAT,
        {
            "messages": HELLO,
            "tools": [CALL],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [CALL]},
            },
        },
        "tools",
    ),
    ("/v1/responses", {"input": [{"role": "user", "content": [LISTED]}]}, "content"),
    ("/v1/responses", {"input": [{"type": "reasoning", "content": [LISTED]}]}, "content"),
    (
        "/v1/responses",
        {"input": [{"type": "function_call_output", "call_id": "a", "output": [LISTED]}]},
        "output",
    ),
    (
        "/v1/responses",
        {"input": "a", "tools": [{"type": "namespace", "name": "n", "tools": [CALL]}]},
        "tools",
    ),
    ("/v1/messages", {"messages": [{"role": "user", "content": [LISTED]}]}, "content"),
    (
        "/v1/messages",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "a", "content": [LISTED]}],
                }
            ]
        },
        "content",
    ),
    (
        "/v1/messages",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "document", "source": {"type": "content", "content": [LISTED]}}
                    ],
                }
            ]
        },
        "content",
    ),
    ("/tokenize", {"messages": [{"role": "user", "content": [LISTED]}]}, "content"),
]


def _longer(value: Any, name: str, count: int) -> Any:
    """The value with its innermost list of this name `count` times as long."""
    if isinstance(value, list):
        return [_longer(one, name, count) for one in value]
    if not isinstance(value, dict):
        return value
    inner = {key: _longer(one, name, count) for key, one in value.items()}
    if isinstance(value.get(name), list) and inner == value:
        return {**value, name: value[name] * count}
    return inner


@pytest.mark.parametrize(("path", "body", "name"), NESTED)
def test_a_list_within_an_item_is_refused_by_its_length(
    asker: Asker, path: str, body: dict[str, Any], name: str
) -> None:
    """Nothing is done with the items of the body before."""
    long = _longer(body, name, MAX_MESSAGES + 1)
    if path == "/v1/messages":
        long["max_tokens"] = 1
    wide = Asker(asker.llm, max_body_values=2**22)
    answer = wide.post(path, long)
    assert answer.status_code == 400
    assert f"at most {MAX_MESSAGES} items" in answer.text
    assert f"{name} should have" in answer.text
