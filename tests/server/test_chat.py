"""/v1/chat/completions: whole answers and streams are the same text, with usage and reasons."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.in_process_client import HELLO, Asker, reasons_of, text_of

PATH = "/v1/chat/completions"


def test_an_answer_is_what_the_model_says(asker: Asker) -> None:
    answer = asker.ok(PATH, model="demo", messages=HELLO, max_tokens=8)
    ids = asker.llm.tokenizer.apply_chat_template(HELLO)
    [expected] = asker.llm.generate(ids, {"max_tokens": 8})[0].outputs
    assert answer["id"].startswith("chatcmpl-")
    assert (answer["object"], answer["model"]) == ("chat.completion", "demo")
    [choice] = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected.text, "refusal": None}
    assert (choice["index"], choice["logprobs"]) == (0, None)
    assert choice["finish_reason"] == expected.finish_reason == "length"
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(ids), 8)
    assert usage["total_tokens"] == len(ids) + 8


def test_a_stream_has_the_text_of_the_whole_answer(asker: Asker) -> None:
    fields: dict[str, Any] = {"messages": HELLO, "max_tokens": 30, "temperature": 1.0, "seed": 3}
    whole = asker.ok(PATH, **fields)
    events = asker.events(PATH, **fields, stream_options={"include_usage": True})
    assert text_of(events) == whole["choices"][0]["message"]["content"]
    assert reasons_of(events) == [whole["choices"][0]["finish_reason"]]
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert len({(event["id"], event["created"]) for event in events}) == 1
    *others, last = events
    assert (last["choices"], last["usage"]["total_tokens"]) == ([], whole["usage"]["total_tokens"])
    assert all(event["usage"] is None for event in others)


def test_completions_of_a_stream_come_by_their_index(asker: Asker) -> None:
    fields: dict[str, Any] = {
        "messages": HELLO, "max_tokens": 20, "n": 3, "temperature": 1.0, "seed": 5,
    }  # fmt: skip
    whole = asker.ok(PATH, **fields)
    events = asker.events(PATH, **fields)
    assert len({choice["message"]["content"] for choice in whole["choices"]}) > 1
    for choice in whole["choices"]:
        assert text_of(events, choice["index"]) == choice["message"]["content"]
        assert reasons_of(events, choice["index"]) == [choice["finish_reason"]]


def test_usage_comes_with_every_event_when_it_is_wanted(asker: Asker) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = asker.events(PATH, messages=HELLO, max_tokens=8, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 8
    assert all(e["usage"]["prompt_tokens"] == events[-1]["usage"]["prompt_tokens"] for e in events)


def test_a_prompt_that_was_seen_is_counted_as_cached(asker: Asker) -> None:
    messages = [{"role": "user", "content": "Tell me about the cat and the sun. " * 6}]
    fields: dict[str, Any] = {"messages": messages, "max_tokens": 2, "cache_salt": "cached"}
    first, second = (asker.ok(PATH, **fields)["usage"] for _ in range(2))
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert 0 < second["prompt_tokens_details"]["cached_tokens"] < second["prompt_tokens"]
    *_, last = asker.events(PATH, **fields, stream_options={"include_usage": True})
    assert last["usage"] == second


def test_log_probabilities_are_those_of_the_tokens(asker: Asker) -> None:
    fields: dict[str, Any] = {
        "messages": HELLO, "max_tokens": 6, "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    [choice] = asker.ok(PATH, **fields)["choices"]
    content = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == choice["message"]["content"]
    for entry in content:
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert len(entry["top_logprobs"]) == 2
        assert entry["logprob"] == entry["top_logprobs"][0]["logprob"]  # greedy
    events = asker.events(PATH, **fields)
    told = [c["logprobs"] for event in events for c in event["choices"] if c["logprobs"]]
    streamed = [entry for one in told for entry in one["content"]]
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in content]
    for one, other in zip(streamed, content, strict=True):
        assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-4)


def test_a_stop_text_ends_an_answer_and_is_named(asker: Asker) -> None:
    whole = asker.ok(PATH, messages=HELLO, max_tokens=8)["choices"][0]["message"]["content"]
    stop = whole[4:7]
    fields: dict[str, Any] = {"messages": HELLO, "max_tokens": 8, "stop": ["never", stop]}
    [choice] = asker.ok(PATH, **fields)["choices"]
    assert choice["message"]["content"] == whole[: whole.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    events = asker.events(PATH, **fields)
    assert text_of(events) == choice["message"]["content"]
    assert events[-1]["choices"][0]["stop_reason"] == stop


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_has_the_form_that_was_asked_for(asker: Asker, stream: bool) -> None:
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["age"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    fields: dict[str, Any] = {"messages": HELLO, "max_tokens": 40, "response_format": form}
    if stream:
        text = text_of(asker.events(PATH, **fields))
    else:
        text = asker.ok(PATH, **fields)["choices"][0]["message"]["content"]
    assert set(json.loads(text)) == {"age"}


def test_parts_of_a_content_are_one_text(asker: Asker) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo!"}]
    as_parts = asker.ok(PATH, messages=[{"role": "user", "content": parts}], max_tokens=4)
    assert as_parts["choices"] == asker.ok(PATH, messages=HELLO, max_tokens=4)["choices"]


def test_the_beginning_of_an_answer_is_continued(asker: Asker) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Once upon"}]
    [choice] = asker.ok(PATH, messages=messages, max_tokens=3, continue_final_message=True)[
        "choices"
    ]
    assert choice["message"]["content"].startswith(" a")
