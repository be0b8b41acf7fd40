"""Every feature of OpenAI's client that the server has, over HTTP: forms of prompts, usage,
log-probabilities, tools, reasoning, structured output, Responses, and errors as its classes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import pytest
from pydantic import BaseModel

from tests.server.in_process_client import HELLO, Asker
from tests.server.test_connections import listening

if TYPE_CHECKING:
    import openai

    from enginebay import LLM

CHAT: dict[str, Any] = {"model": "demo", "messages": HELLO, "max_tokens": 8}
TEXT: dict[str, Any] = {"model": "demo", "prompt": "One day", "max_tokens": 6}
AGE = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["age"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "set_age", "parameters": AGE}}
NAMED: Any = {"type": "function", "function": {"name": "set_age"}}
CALL = '<tool_call>{"name": "set_age", "arguments": {"age": 7}}</tool_call>'


class Weather(BaseModel):
    kind: Literal["sun", "rain"]


@pytest.fixture
def url(llm: LLM) -> Iterator[str]:
    asker = Asker(llm, {"tool_parser": "hermes", "reasoning_parser": "think"})
    with listening(asker) as found:
        yield f"{found}/v1"


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    from openai import OpenAI

    with OpenAI(base_url=url, api_key="unused", max_retries=0) as made:
        yield made


def asynchronously(url: str, ask: Callable[[openai.AsyncOpenAI], Awaitable[Any]]) -> Any:
    from openai import AsyncOpenAI

    async def run() -> Any:
        async with AsyncOpenAI(base_url=url, api_key="unused", max_retries=0) as client:
            return await ask(client)

    return asyncio.run(run())


def says(text: str) -> dict[str, Any]:
    """Fields with which the answer is a text."""
    return {"max_tokens": 200, "extra_body": {"guided_choice": [text]}}


def test_sampling_parameters_reach_the_model(client: openai.OpenAI, llm: LLM) -> None:
    def ask(**fields: Any) -> str:
        return str(client.chat.completions.create(**{**CHAT, **fields}).choices[0].message.content)

    greedy = ask(temperature=0)
    assert ask(temperature=2.0, seed=5) == ask(temperature=2.0, seed=5)
    assert ask(temperature=2.0, top_p=1e-6) == greedy
    assert ask(stop=greedy[4:7]) == greedy.partition(greedy[4:7])[0]
    assert len(ask(max_completion_tokens=2)) < len(greedy)
    [cat] = llm.tokenizer.encode(" cat")
    assert ask(logit_bias={str(cat): 100}, max_tokens=2) == " cat cat"
    repeated = {"logit_bias": {str(cat): 20}, "frequency_penalty": 2.0, "presence_penalty": 2.0}
    assert ask(**repeated, max_tokens=40).count(" cat") < 40
    assert ask(extra_body={"guided_regex": "[0-9]{3}"}).isdigit()
    assert ask(user="somebody", metadata={"a": "b"}, store=False) == greedy


def test_usage_is_exact_and_can_come_with_every_event(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**CHAT, n=2, temperature=1.0, seed=1).usage
    assert whole is not None
    assert whole.completion_tokens == 16
    assert whole.prompt_tokens_details is not None
    assert whole.total_tokens == whole.prompt_tokens + 16
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    events = list(client.chat.completions.create(**CHAT, stream=True, stream_options=options))
    counts = [event.usage.completion_tokens for event in events if event.usage]
    assert len(counts) == len(events)
    assert (counts[0], counts[-1]) == (0, 8)
    assert events[-1].choices == []
    silent = client.chat.completions.create(**CHAT, stream=True)
    assert not any(event.usage for event in silent)


def test_completions_take_every_form_of_prompt(client: openai.OpenAI, llm: LLM) -> None:
    ids = llm.tokenizer.encode("One day")
    alone = client.completions.create(**TEXT).choices[0].text
    for prompt in (ids, ["One day", "One day"], [ids, ids]):
        answer = client.completions.create(**{**TEXT, "prompt": prompt})
        assert {choice.text for choice in answer.choices} == {alone}
    echoed = client.completions.create(**TEXT, echo=True)
    assert echoed.choices[0].text == f"One day{alone}"
    assert client.completions.create(**TEXT, best_of=2, temperature=1.0, seed=1).choices


def test_completions_stream_by_index_with_offsets_of_tokens(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {**TEXT, "n": 2, "temperature": 1.0, "seed": 2, "logprobs": 1}
    whole = client.completions.create(**fields)
    texts, offsets = ["", ""], [[], []]  # type: ignore[var-annotated]
    for event in client.completions.create(**fields, stream=True):
        for choice in event.choices:
            texts[choice.index] += choice.text
            offsets[choice.index] += choice.logprobs.text_offset if choice.logprobs else []
    assert texts == [choice.text for choice in whole.choices]
    assert len(set(texts)) == 2
    for choice, found in zip(whole.choices, offsets, strict=True):
        assert choice.logprobs is not None
        assert choice.logprobs.text_offset == found
        assert choice.logprobs.tokens is not None
        for token, offset in zip(choice.logprobs.tokens, found, strict=True):
            assert choice.text[offset:].startswith(token)


def test_a_schema_holds_whole_and_streamed(client: openai.OpenAI, url: str) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "age", "schema": AGE}}
    asked: dict[str, Any] = {**CHAT, "max_tokens": 40}
    answer = client.chat.completions.create(**asked, response_format=form)
    assert set(json.loads(answer.choices[0].message.content or "")) == {"age"}
    with client.chat.completions.stream(**asked, response_format=Weather) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Weather)

    async def ask(client: openai.AsyncOpenAI) -> Any:
        async with client.chat.completions.stream(**asked, response_format=Weather) as events:
            kinds = [event.type async for event in events]
            return kinds, (await events.get_final_completion()).choices[0].message.parsed

    kinds, parsed = asynchronously(url, ask)
    assert "content.done" in kinds
    assert isinstance(parsed, Weather)
    plain = client.chat.completions.create(
        **{**CHAT, "max_tokens": 60}, response_format={"type": "json_object"}
    )
    assert plain.choices[0].finish_reason in ("stop", "length")


@pytest.mark.parametrize(
    ("choice", "content"),
    [("none", CALL), ("auto", None), ("required", None), (NAMED, None)],
    ids=["none", "auto", "required", "named"],
)
def test_each_tool_choice_is_followed(client: openai.OpenAI, choice: Any, content: Any) -> None:
    demanded = choice not in ("none", "auto")
    fields = {"max_tokens": 60} if demanded else says(CALL)
    asked: dict[str, Any] = {
        **CHAT, "tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False, **fields,
    }  # fmt: skip
    [whole] = client.chat.completions.create(**asked).choices
    with client.chat.completions.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        [streamed] = stream.get_final_completion().choices
    for one in (whole, streamed):
        assert one.message.content == content or not (content or one.message.content)
        calls = one.message.tool_calls or []
        assert one.finish_reason == ("stop" if choice == "none" else "tool_calls")
        assert len(calls) == (choice != "none")
        for call in calls:
            assert call.function.name == "set_age"
            assert 0 <= json.loads(call.function.arguments)["age"] <= 9
    assert ("tool_calls.function.arguments.done" in kinds) == (choice != "none")


def test_parallel_calls_reasoning_and_results_go_both_ways(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {**CHAT, "tools": [TOOL], **says(f"<think>Hm.</think>{CALL}{CALL}")}
    message = client.chat.completions.create(**asked).choices[0].message
    calls = message.tool_calls or []
    assert len({call.id for call in calls}) == 2
    assert message.model_extra is not None
    assert message.model_extra["reasoning_content"] == "Hm."
    results: Any = [{"role": "tool", "tool_call_id": call.id, "content": "7"} for call in calls]
    turns: Any = [*HELLO, message.model_dump(exclude_none=True), *results]
    assert client.chat.completions.create(**{**CHAT, "messages": turns}).choices


def test_responses_have_tools_schemas_items_and_ends(client: openai.OpenAI, url: str) -> None:
    import openai

    tool: Any = {"type": "function", "name": "set_age", "parameters": AGE, "strict": True}
    called = client.responses.create(
        model="demo", input="Hello!", tools=[tool], tool_choice="required", max_output_tokens=60,
        parallel_tool_calls=False,
    )  # fmt: skip
    [call] = called.output
    assert call.type == "function_call"
    assert set(json.loads(call.arguments)) == {"age"}
    output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "done"}]
    after = client.responses.create(
        model="demo", input=output, previous_response_id=called.id, max_output_tokens=2
    )
    assert (after.status, after.incomplete_details is None) == ("incomplete", False)
    assert [item.type for item in client.responses.input_items.list(after.id)] == [
        "function_call_output"
    ]
    parsed = client.responses.parse(
        model="demo", input="The weather?", text_format=Weather, max_output_tokens=40
    )
    assert isinstance(parsed.output_parsed, Weather)
    client.responses.delete(after.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(after.id)

    async def ask(client: openai.AsyncOpenAI) -> Any:
        fields: Any = {"model": "demo", "input": "Hello!", "max_output_tokens": 8}
        whole = await client.responses.create(**fields, instructions="Be kind.", store=False)
        async with client.responses.stream(**fields, instructions="Be kind.") as events:
            deltas = [e.delta async for e in events if e.type == "response.output_text.delta"]
        return whole.output_text, "".join(deltas)

    whole, streamed = asynchronously(url, ask)
    assert whole == streamed != ""


def test_embeddings_come_in_both_encodings(client: openai.OpenAI, llm: LLM) -> None:
    ids = llm.tokenizer.encode("One day")
    fields: dict[str, Any] = {"model": "demo"}
    first = client.embeddings.create(**fields, input="One day").data[0].embedding
    plain = client.embeddings.create(**fields, input=[ids], encoding_format="float")
    assert plain.data[0].embedding == pytest.approx(first, abs=1e-6)
    assert plain.usage.prompt_tokens == len(ids)


def test_an_answer_has_the_id_of_its_request(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        **CHAT, extra_headers={"x-request-id": "mine-8"}
    )
    assert raw.headers["x-request-id"] == "mine-8"
    assert raw.parse()._request_id == "mine-8"


def test_each_error_is_a_class_of_the_client(llm: LLM) -> None:
    import openai

    asker = Asker(
        llm, api_keys=("key-of-the-client",), max_body_bytes=2000, max_concurrency=1, max_queue=0
    )

    def error(kind: type[openai.APIError], **fields: Any) -> Any:
        with pytest.raises(kind) as caught:
            made.chat.completions.create(**{**CHAT, **fields})
        assert type(caught.value) is kind
        return caught.value

    with listening(asker) as url:
        made = openai.OpenAI(base_url=f"{url}/v1", api_key="key-of-the-client", max_retries=0)
        assert error(openai.BadRequestError, temperature=-1).param == "temperature"
        assert error(openai.NotFoundError, model="other").code == "model_not_found"
        long = [{"role": "user", "content": "a" * 3000}]
        assert error(openai.APIStatusError, messages=long).status_code == 413
        error(openai.APITimeoutError, timeout=1e-6)
        intruder = made.with_options(api_key="another-key")
        with pytest.raises(openai.AuthenticationError):
            intruder.chat.completions.create(**CHAT)
        stream = made.chat.completions.create(**{**CHAT, "max_tokens": 200}, stream=True)
        next(stream)
        assert error(openai.RateLimitError).response.headers["retry-after"] == "1"
        stream.close()
        asker.state.is_draining = True
        assert error(openai.InternalServerError).code == "server_draining"
    with pytest.raises(openai.APIConnectionError):
        made.chat.completions.create(**CHAT)
    made.close()


def test_a_failure_in_a_stream_is_an_error_of_the_client(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    import openai

    from enginebay_server.chat import ChatStream
    from enginebay_server.errors import ApiError

    def fail(*_: Any) -> bytes:
        raise ApiError(503, "the engine has stopped", code="engine_stopped")

    monkeypatch.setattr(ChatStream, "write", fail)
    with (
        listening(Asker(llm)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client,
    ):
        stream = client.chat.completions.create(**CHAT, stream=True)
        assert next(stream).choices[0].delta.role == "assistant"
        with pytest.raises(openai.APIError, match="the engine has stopped"):
            next(stream)
