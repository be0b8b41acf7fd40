"""OpenAI's own client, against a server in a process of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.server.in_process_client import HELLO
from tests.server.process import ServerProcess

if TYPE_CHECKING:
    import openai

KEY = "key-of-the-client"
CHAT: dict[str, Any] = {"model": "demo", "messages": HELLO, "max_tokens": 8}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    flags = ("--warmup", "lazy", "--log-level", "info")
    with ServerProcess(*flags, environment={"ENGINEBAY_API_KEY": KEY}) as started:
        yield started
    assert not any(KEY in line for line in [*started.lines, *started.errors])


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    from openai import OpenAI

    with OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as made:
        yield made


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").owned_by == "enginebay"


def test_a_chat_is_answered_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**CHAT)
    text = whole.choices[0].message.content
    assert text
    assert whole.usage is not None
    stream = client.chat.completions.create(
        **CHAT, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    deltas = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(deltas) == text
    assert chunks[-1].usage == whole.usage


def test_the_streaming_helper_builds_the_whole_answer(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        **CHAT, "max_tokens": 100, "n": 2, "temperature": 1.0, "seed": 2, "logprobs": True,
    }  # fmt: skip
    with client.chat.completions.stream(**fields) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done", "logprobs.content.done"} <= kinds
    whole = client.chat.completions.create(**fields)
    assert [one.message.content for one in final.choices] == [
        one.message.content for one in whole.choices
    ]
    told = final.choices[1].logprobs
    assert told is not None
    assert whole.choices[1].logprobs is not None
    tokens = [entry.token for entry in told.content or ()]
    assert tokens == [entry.token for entry in whole.choices[1].logprobs.content or ()]


def test_an_answer_is_parsed_into_a_class(client: openai.OpenAI) -> None:
    from typing import Literal

    from pydantic import BaseModel

    class Weather(BaseModel):
        kind: Literal["sun", "rain"]

    parsed = client.chat.completions.parse(**{**CHAT, "max_tokens": 40}, response_format=Weather)
    assert isinstance(parsed.choices[0].message.parsed, Weather)


def test_completions_and_embeddings_are_answered(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="demo", prompt=["One day", "The cat"], max_tokens=4, echo=True
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].text.startswith("One day")
    vectors = client.embeddings.create(model="demo", input=["One day", "The cat"])  # base64
    assert len(vectors.data) == 2
    assert sum(x * x for x in vectors.data[0].embedding) == pytest.approx(1, abs=1e-3)


def test_errors_are_the_classes_of_the_client(server: ServerProcess, client: openai.OpenAI) -> None:
    import openai

    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(**{**CHAT, "model": "other"})
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(**CHAT, extra_body={"temprature": 1})
    assert wrong.value.param == "temprature"
    intruder = openai.OpenAI(base_url=f"{server.url}/v1", api_key="another-key", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        intruder.models.list()


def test_the_asynchronous_client_streams_many_at_once(server: ServerProcess) -> None:
    from openai import AsyncOpenAI

    async def one(client: AsyncOpenAI, seed: int, *, stream: bool) -> str:
        fields: dict[str, Any] = {**CHAT, "temperature": 1.0, "seed": seed}
        if not stream:
            whole = await client.chat.completions.create(**fields)
            return str(whole.choices[0].message.content)
        chunks = await client.chat.completions.create(**fields, stream=True)
        return "".join(
            [c.delta.content or "" async for chunk in chunks for c in chunk.choices]
        )  # fmt: skip

    async def run() -> tuple[list[str], list[str]]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY) as client:
            alone = [await one(client, seed, stream=False) for seed in range(8)]
            together = await asyncio.gather(*(one(client, seed, stream=True) for seed in range(8)))
            return alone, list(together)

    alone, together = asyncio.run(run())
    assert together == alone


def test_a_killed_client_frees_what_it_held(server: ServerProcess, client: openai.OpenAI) -> None:
    import socket
    import time
    from urllib.parse import urlsplit

    import httpx

    at = urlsplit(server.url)
    body = json.dumps(
        {"prompt": "One day", "max_tokens": 250, "ignore_eos": True, "n": 4, "stream": True}
    )
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((at.hostname, at.port), timeout=60) as connection:
        connection.sendall((head + body).encode())
        assert b"200" in connection.recv(100)
    until_s = time.monotonic() + 60
    headers = {"authorization": f"Bearer {KEY}"}
    running = 'enginebay:num_requests_running{model_name="demo"} 0.0'
    aborted = 'finished_reason="abort",model_name="demo"} 4.0'
    while True:
        text = httpx.get(f"{server.url}/metrics", headers=headers).text
        if running in text and aborted in text:
            break
        assert time.monotonic() < until_s, text
        time.sleep(0.05)
    assert client.chat.completions.create(**CHAT).choices


def test_responses_are_answered_streamed_and_continued(client: openai.OpenAI) -> None:
    first = client.responses.create(model="demo", input="Hello!", max_output_tokens=60)
    assert first.status == "completed"
    assert first.output_text
    with client.responses.stream(model="demo", input="Hello!", max_output_tokens=60) as stream:
        deltas = [e.delta for e in stream if e.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == first.output_text
    second = client.responses.create(
        model="demo", input="Why?", previous_response_id=first.id, max_output_tokens=4
    )
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    assert client.responses.retrieve(first.id).output_text == first.output_text
    client.responses.delete(first.id)


def test_tools_are_called_through_the_client(client: openai.OpenAI) -> None:
    function: Any = {
        "name": "paint",
        "parameters": {
            "type": "object",
            "properties": {"color": {"enum": ["red", "blue"]}},
            "required": ["color"],
            "additionalProperties": False,
        },
    }
    tools: Any = [{"type": "function", "function": function}]
    with client.chat.completions.stream(
        **{**CHAT, "max_tokens": 60}, tools=tools, tool_choice="required", parallel_tool_calls=False
    ) as stream:
        final = stream.get_final_completion()
    [choice] = final.choices
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls or []
    assert json.loads(call.function.arguments)["color"] in ("red", "blue")
