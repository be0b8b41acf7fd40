"""/v1/responses: answers, their streams, and what is kept of them."""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from enginebay.errors import InputError
from enginebay_server.response_store import (
    MemoryStore,
    ResponseStore,
    SqliteStore,
    StoredResponse,
    StoreLimits,
)
from tests.server.in_process_client import HELLO, Asker, error_of
from tests.server.test_tools import CALL, PARSERS

PATH = "/v1/responses"
NOW = {"type": "function", "name": "now", "parameters": {"type": "object"}, "strict": True}


def events_of(asker: Asker, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, numbered and each under its name."""
    answer = asker.post(PATH, {"input": "Hello!", "stream": True, **body})
    assert answer.status_code == 200, answer.text
    events = []
    for block in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def plain(response: dict[str, Any]) -> dict[str, Any]:
    """A response without what differs from one to the next."""
    items = [
        {key: value for key, value in item.items() if key not in ("id", "call_id")}
        for item in response["output"]
    ]
    own = ("id", "created_at", "completed_at", "usage", "output")
    rest = {key: value for key, value in response.items() if key not in own}
    return {**rest, "output": items}


def text_of(response: dict[str, Any]) -> str:
    parts = [item["content"] for item in response["output"] if item["type"] == "message"]
    return "".join(part["text"] for content in parts for part in content)


def test_a_response_is_what_the_chat_answers(asker: Asker) -> None:
    chat = asker.ok("/v1/chat/completions", messages=HELLO, max_tokens=8)
    response = asker.ok(
        PATH, model="demo", input="Hello!", max_output_tokens=8, metadata={"a": "b"}
    )
    assert text_of(response) == chat["choices"][0]["message"]["content"]
    assert (response["object"], response["status"]) == ("response", "incomplete")
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][-1]["status"] == "incomplete"
    assert response["metadata"] == {"a": "b"}
    assert response["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert response["usage"]["output_tokens"] == 8
    longer = asker.ok(PATH, input="Hello!", max_output_tokens=100)
    assert (longer["status"], longer["incomplete_details"]) == ("completed", None)


@pytest.mark.parametrize("max_tokens", [8, 100])
def test_a_stream_ends_with_the_whole_response(asker: Asker, max_tokens: int) -> None:
    whole = asker.ok(PATH, input="Hello!", max_output_tokens=max_tokens)
    first, second, *middle, last = events_of(asker, max_output_tokens=max_tokens)
    assert (first["type"], second["type"]) == ("response.created", "response.in_progress")
    assert first["response"]["output"] == []
    assert last["type"] == f"response.{whole['status']}"
    assert plain(last["response"]) == plain(whole)
    kinds = [event["type"].removeprefix("response.") for event in middle]
    deltas = [event["delta"] for event in middle if event["type"].endswith("text.delta")]
    assert "".join(deltas) == text_of(whole)
    assert [kind for kind in kinds if kind != "output_text.delta"] == [
        "output_item.added", "content_part.added", "output_text.done", "content_part.done",
        "output_item.done",
    ]  # fmt: skip
    assert middle[-1]["item"] == last["response"]["output"][0]


def test_reasoning_and_calls_are_items(asker: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    parsing = Asker(asker.llm, PARSERS)
    from enginebay_server import routes_responses

    chat_params = routes_responses.chat_params

    def guided(*args: Any) -> Any:
        text = re.escape(f"<think>So.</think>I look.{CALL}")
        return chat_params(*args).model_copy(update={"regex": text})

    monkeypatch.setattr(routes_responses, "chat_params", guided)
    body: dict[str, Any] = {"max_output_tokens": 200, "tools": [NOW]}
    whole = parsing.ok(PATH, input="Hello!", **body)
    reasoning, message, call = whole["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "So."}]
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    assert message["content"][0]["text"] == "I look."
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "now", "{}")
    events = events_of(parsing, **body)
    assert plain(events[-1]["response"]) == plain(whole)
    told = parsing.ok(PATH, input="Hello!", **body, **LOGPROBS)["output"][1]["content"][0]
    assert "".join(entry["token"] for entry in told["logprobs"]).startswith("I look.")
    assert len(told["logprobs"]) < 10
    logged = told_of(events_of(parsing, **body, **LOGPROBS), "delta")
    assert [entry["token"] for entry in logged] == [entry["token"] for entry in told["logprobs"]]
    [done] = [e for e in events if e["type"] == "response.function_call_arguments.done"]
    assert done["arguments"] == "{}"
    # The result of the call goes on with what is kept.
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "noon"}
    monkeypatch.undo()
    parsing.ok(PATH, previous_response_id=whole["id"], input=[result], max_output_tokens=2)


LOGPROBS: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


def told_of(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """The log-probabilities of all events of a name."""
    found = [e["logprobs"] for e in events if e["type"] == f"response.output_text.{name}"]
    return [entry for entries in found for entry in entries]


def shape_of(entries: list[dict[str, Any]]) -> list[Any]:
    """Log-probabilities with numbers that equal those of another batch."""
    return [
        (e["token"], e["bytes"], pytest.approx(e["logprob"], abs=1e-4), len(e["top_logprobs"]))
        for e in entries
    ]


def test_log_probabilities_of_a_text_are_those_of_the_chat(asker: Asker) -> None:
    from openai.types.responses import ResponseOutputText, ResponseTextDeltaEvent

    fields: dict[str, Any] = {"messages": HELLO, "max_tokens": 8, "logprobs": True}
    [choice] = asker.ok("/v1/chat/completions", **fields, top_logprobs=2)["choices"]
    whole = asker.ok(PATH, input="Hello!", max_output_tokens=8, **LOGPROBS)
    [part] = whole["output"][0]["content"]
    told = part["logprobs"]
    assert shape_of(told) == shape_of(choice["logprobs"]["content"])
    assert [len(entry["top_logprobs"]) for entry in told] == [2] * 8
    assert all(entry.keys() == {"token", "bytes", "logprob", "top_logprobs"} for entry in told)
    assert all(t.keys() == {"token", "bytes", "logprob"} for e in told for t in e["top_logprobs"])
    assert "".join(entry["token"] for entry in told) == part["text"]
    ResponseOutputText.model_validate(part, strict=True)
    assert whole["top_logprobs"] == 2
    assert asker.get(f"{PATH}/{whole['id']}").json()["output"] == whole["output"]

    events = events_of(asker, max_output_tokens=8, **LOGPROBS)
    deltas = told_of(events, "delta")
    assert shape_of(deltas) == shape_of(told)
    assert told_of(events, "done") == deltas
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == deltas
    for event in (e for e in events if e["type"] == "response.output_text.delta"):
        ResponseTextDeltaEvent.model_validate(event, strict=True)
        assert "".join(entry["token"] for entry in event["logprobs"]) == event["delta"]
    answers = {"role": "assistant", "content": whole["output"][0]["content"]}
    asker.ok(PATH, input=[*HELLO, answers, *HELLO], max_output_tokens=1)


def test_log_probabilities_are_returned_where_the_request_includes_them(asker: Asker) -> None:
    for fields, count in ((LOGPROBS | {"top_logprobs": None}, 0), ({"top_logprobs": 2}, None)):
        answer = asker.post(PATH, {"input": "Hello!", "max_output_tokens": 4, **fields})
        told = answer.json()["output"][0]["content"][0]["logprobs"]
        assert [len(entry["top_logprobs"]) for entry in told] == ([] if count is None else [0] * 4)
        ignored = answer.headers.get("x-enginebay-ignored")
        assert ignored == ("top_logprobs" if count is None else None)
        events = events_of(asker, max_output_tokens=4, **fields)
        assert len(told_of(events, "delta")) == len(told_of(events, "done")) == len(told)
    assert asker.refused(PATH, 400, input="a", top_logprobs=21)["param"] == "top_logprobs"
    assert asker.refused(PATH, 400, input="a", top_logprobs=-1)["param"] == "top_logprobs"


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_goes_on_with_what_is_kept(asker: Asker, stream: bool) -> None:
    if stream:
        first = events_of(asker, max_output_tokens=8)[-1]["response"]
    else:
        first = asker.ok(PATH, input="Hello!", max_output_tokens=8)
    second = asker.ok(PATH, previous_response_id=first["id"], input="Why?", max_output_tokens=8)
    messages = [
        *HELLO,
        {"role": "assistant", "content": text_of(first)},
        {"role": "user", "content": "Why?"},
    ]
    chat = asker.ok("/v1/chat/completions", messages=messages, max_tokens=8)
    assert text_of(second) == chat["choices"][0]["message"]["content"]
    assert second["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert second["previous_response_id"] == first["id"]


def test_instructions_come_first_and_hold_for_one_turn(asker: Asker) -> None:
    system = {"role": "system", "content": "Be brief."}
    first = asker.ok(PATH, input="Hello!", instructions="Be brief.", max_output_tokens=4)
    count = asker.ok("/v1/count_tokens", messages=[system, *HELLO])["input_tokens"]
    assert first["usage"]["input_tokens"] == count
    second = asker.ok(PATH, previous_response_id=first["id"], input="Why?", max_output_tokens=1)
    messages = [
        *HELLO,
        {"role": "assistant", "content": text_of(first)},
        {"role": "user", "content": "Why?"},
    ]
    count = asker.ok("/v1/count_tokens", messages=messages)["input_tokens"]
    assert second["usage"]["input_tokens"] == count


def test_a_response_is_kept_until_it_is_deleted(asker: Asker) -> None:
    made = asker.ok(PATH, input="Hello!", max_output_tokens=1)
    place = f"{PATH}/{made['id']}"
    assert asker.get(place).json() == made
    [item] = asker.get(f"{place}/input_items").json()["data"]
    assert item["content"] == [{"type": "input_text", "text": "Hello!"}]
    deleted = asker.all(("DELETE", place, {}))[0]
    assert deleted.json()["deleted"] is True
    error = error_of(asker.get(place), 404)
    assert error["code"] == "response_not_found"
    error_of(asker.all(("DELETE", place, {}))[0], 404)
    unkept = asker.ok(PATH, input="Hello!", max_output_tokens=1, store=False)
    error_of(asker.get(f"{PATH}/{unkept['id']}"), 404)
    error = asker.refused(PATH, 404, input="a", previous_response_id=unkept["id"])
    assert error["param"] == "previous_response_id"


def test_the_form_of_a_text_is_kept_to(asker: Asker) -> None:
    form: dict[str, Any] = {
        "type": "json_schema",
        "name": "answer",
        "schema": {"enum": ["yes", "no"]},
        "strict": True,
    }
    response = asker.ok(PATH, input="Is it late?", text={"format": form}, max_output_tokens=20)
    assert json.loads(text_of(response)) in ("yes", "no")
    form["name"] = 7  # it changes nothing
    asker.ok(PATH, input="Is it late?", text={"format": form}, max_output_tokens=20)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "reasoning"}]}, "input"),
        ({"input": [], "instructions": "Be brief."}, "input"),
        ({"input": "a", "text": {"format": 7}}, "text.format"),
        (
            {"input": "a", "text": {"format": {"type": "json_schema", "schema": "x"}}},
            "text.format.schema",
        ),
        ({"input": [{"type": "computer_call"}]}, "input.0"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "messages.0.content.0",
        ),
        ({"input": "a", "tools": [{"name": "f"}]}, "tools"),
        ({"input": "a", "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input.0"),
        ({"input": "a", "text": {"format": {"type": "yaml"}}}, "text.format"),
        (
            {"input": "a", "text": {"format": {"type": "json_schema"}}},
            "response_format.json_schema",
        ),
        ({"input": "a", "background": True}, "background"),
        ({"input": "a", "reasoning": {"effort": 3}}, "reasoning.effort"),
        ({"input": "a", "max_output_token": 3}, "max_output_token"),
    ],
)
def test_a_wrong_field_is_named(asker: Asker, fields: dict[str, Any], param: str) -> None:
    assert asker.refused(PATH, 400, **fields)["param"] == param


def stored(text: str) -> StoredResponse:
    return StoredResponse(
        {"text": text}, [{"type": "message"}], [{"role": "user", "content": text}]
    )


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_store_keeps_the_newest_for_their_time(kind: str, tmp_path: Path) -> None:
    now_s = [100.0]
    made: ResponseStore
    if kind == "memory":
        made = MemoryStore(StoreLimits(2, 10**6, 10.0), lambda: now_s[0])
    else:
        made = SqliteStore(
            str(tmp_path / "responses"), StoreLimits(2, 10**6, 10.0), lambda: now_s[0]
        )
    for name in "abc":
        made.put(name, stored(name))
        now_s[0] += 4
    assert made.get("a") is None  # two are kept
    assert made.get("b") == stored("b")
    now_s[0] += 4
    assert made.get("b") is None  # 12 s old
    assert made.get("c") == stored("c")
    assert made.delete("c")
    assert not made.delete("c")
    made.close()


def test_a_file_keeps_responses_for_the_next_process(tmp_path: Path) -> None:
    path = tmp_path / "responses"
    for expected in (None, stored("a")):
        made = SqliteStore(str(path), StoreLimits(10, 10**6, 60.0))
        assert made.get("a") == expected
        made.put("a", stored("a"))
        made.close()
    assert path.stat().st_mode & 0o077 == 0  # conversations are read by their owner alone


@pytest.mark.parametrize(
    "content", [b"no database at all, but long enough to be looked at" * 50, None]
)
def test_a_file_that_is_no_store_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "responses"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(InputError, match="--response-store"):
        SqliteStore(str(path), StoreLimits(10, 10**6, 60.0))


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_store_is_bounded_by_its_bytes(kind: str, tmp_path: Path) -> None:
    size = len(stored("a" * 1000).to_bytes())
    limits = StoreLimits(100, 3 * size, 60.0)
    path = tmp_path / "responses"
    made = MemoryStore(limits) if kind == "memory" else SqliteStore(str(path), limits)
    for name in "abcd":
        made.put(name, stored(name * 1000))
    assert [name for name in "abcd" if made.get(name)] == ["b", "c", "d"]
    made.put("c", stored("c" * 1000))  # again: it is counted once
    assert [name for name in "abcd" if made.get(name)] == ["b", "c", "d"]
    made.put("e", stored("e" * 10_000))  # larger than all together may be
    assert made.get("e") is None
    made.put("f", stored("f" * 1000))
    assert made.get("f") == stored("f" * 1000)
    made.close()


def test_a_file_of_an_earlier_version_is_counted_too(tmp_path: Path) -> None:
    path, old = tmp_path / "responses", stored("a" * 1000)
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute(
            "CREATE TABLE responses (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT "
            "NULL, made_s REAL NOT NULL, stored TEXT NOT NULL)"
        )
        row = ("old", time.time(), old.to_bytes().decode())
        database.execute("INSERT INTO responses (id, made_s, stored) VALUES (?, ?, ?)", row)
        database.commit()
    made = SqliteStore(str(path), StoreLimits(10, len(old.to_bytes()) + 10, 60.0))
    assert made.get("old") == old
    made.put("new", stored("b" * 1000))
    assert made.get("old") is None
    made.close()


@pytest.mark.parametrize("in_file", [False, True])
def test_unknown_and_odd_ids_are_refused(asker: Asker, tmp_path: Path, in_file: bool) -> None:
    path = str(tmp_path / "responses") if in_file else None
    served = Asker(asker.llm, response_store=path)
    assert served.state.responses.get("\ud800") is None
    assert not served.state.responses.delete("\ud800")
    for odd in ("\ud800", "\x00", "no", "\U0001f600"):
        content = json.dumps({"input": "Hello!", "previous_response_id": odd})
        answer = served.post(PATH, content=content, headers={"content-type": "application/json"})
        error = error_of(answer, 400 if odd == "\ud800" else 404)
        assert error["param"] == "previous_response_id"
    served.state.close()


def test_metadata_has_the_limits_of_openai(asker: Asker) -> None:
    most = {f"{number:064}": "v" * 512 for number in range(16)}
    made = asker.ok(PATH, input="Hello!", max_output_tokens=1, metadata=most)
    assert made["metadata"] == most
    for wrong in ({"k" * 65: "v"}, {"k": "v" * 513}, {**most, "k": "v"}):
        error = asker.refused(PATH, 400, input="Hello!", metadata=wrong)
        assert error["param"].startswith("metadata")


def test_fields_that_are_ignored_are_not_kept(asker: Asker) -> None:
    made = asker.ok(PATH, input="Hello!", max_output_tokens=1, prompt_cache_key="k" * 10_000)
    kept = asker.state.responses.get(made["id"])
    assert kept is not None
    assert len(kept.to_bytes()) < 5000


@pytest.mark.parametrize("in_file", [False, True])
def test_unknown_fields_of_items_are_counted_where_they_are_kept(
    asker: Asker, tmp_path: Path, in_file: bool
) -> None:
    size = 2**17
    path = str(tmp_path / "responses") if in_file else None
    served = Asker(asker.llm, response_store=path, max_stored_bytes=size + 2**16)
    body = {"input": [{**HELLO[0], "no_such_field": "x" * size}], "max_output_tokens": 1}
    first, second = (served.ok(PATH, **body) for _ in range(2))
    assert served.state.responses.get(first["id"]) is None
    kept = served.state.responses.get(second["id"])
    assert kept is not None
    assert size < len(kept.to_bytes()) < size + 2**16
    served.state.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_disk_takes_no_answer_away(
    asker: Asker, tmp_path: Path, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    served = Asker(asker.llm, response_store=str(tmp_path / "responses"))
    # SQLite refuses to let the file grow, as a full disk does.
    served.state.responses._database.execute("PRAGMA max_page_count = 1")  # type: ignore[attr-defined]
    body = {"input": "a" * 50, "instructions": "b " * 30, "max_output_tokens": 1}
    for _ in range(30):
        answer = served.post(PATH, {**body, "stream": stream})
        assert answer.status_code == 200
        assert 'error"' not in answer.text.replace('"error":null', "")
    assert "is not stored" in caplog.text
    served.state.close()
