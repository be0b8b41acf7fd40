"""What is wrong in a request is refused in OpenAI's form, with the field's name, before anything
runs.
"""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from tests.server.in_process_client import HELLO, Asker, error_of

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMALESS = {"type": "json_schema", "json_schema": {"name": "person"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "Hello"}, "messages"),
        ({"messages": [{"content": "Hello"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages.0.content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content.0",
        ),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 17}, "n"),
        ({"n": 0}, "n"),
        ({"logprobs": True, "top_logprobs": 21}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": SCHEMALESS}, "response_format.json_schema"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"stop": [""]}, "stop"),
        ({"temprature": 1}, "temprature"),
    ],
)
def test_a_wrong_field_is_named(asker: Asker, fields: dict[str, Any], param: str) -> None:
    error = asker.refused(CHAT, 400, **{"messages": HELLO, **fields})
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": [10**6]}, None),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "best_of": 17}, "best_of"),
        ({"prompt": "a", "best_of": 3, "stream": True}, None),
    ],
)
def test_a_wrong_completion_is_refused(
    asker: Asker, fields: dict[str, Any], param: str | None
) -> None:
    error = asker.refused(COMPLETIONS, 400, **fields)
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"].split(".")[0] == param


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_beyond_the_context_has_the_code_that_clients_know(
    asker: Asker, stream: bool
) -> None:
    error = asker.refused(COMPLETIONS, 400, prompt=[5] * 300, stream=stream)
    assert error["code"] == "context_length_exceeded"
    sentences = "The prompt is too long. This model's maximum context length is 256 tokens."
    assert error["message"].endswith(sentences)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"prompt": "a" * 100_000}),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 100_000}]}),
        ("/v1/embeddings", {"input": ["a", "a" * 100_000]}),
    ],
)
def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(
    asker: Asker, path: str, fields: dict[str, Any]
) -> None:
    error = asker.refused(path, 400, **fields)
    assert error["code"] == "context_length_exceeded"
    assert "a prompt of at least" in error["message"]
    assert error["message"].endswith("maximum context length is 256 tokens.")


def test_a_refused_prompt_ends_those_before_it(asker: Asker) -> None:
    asker.refused(COMPLETIONS, 400, prompt=[[5, 6], [10**6]], max_tokens=200)
    assert asker.llm.counts().waiting == 0


def test_an_unknown_model_is_not_found(asker: Asker) -> None:
    error = asker.refused(CHAT, 404, model="demos", messages=HELLO)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "Did you mean 'demo'?" in error["message"]
    assert error_of(asker.get("/v1/models/other"), 404)["code"] == "model_not_found"


def test_unknown_paths_and_methods_have_errors_of_the_same_form(asker: Asker) -> None:
    assert "/v1/nothing" in error_of(asker.get("/v1/nothing"), 404)["message"]
    for method, path, allowed in (
        ("GET", CHAT, "POST"),
        ("POST", "/version", "GET"),
        ("PUT", "/v1/responses/resp_1", "DELETE, GET"),
        ("TRACE", "/v1/models/demo", "GET"),
    ):
        answer = asker.all((method, path, {}))[0]
        error_of(answer, 405)
        assert answer.headers["allow"] == allowed


def test_unknown_fields_are_named_where_they_are_ignored(asker: Asker) -> None:
    lenient = Asker(asker.llm, unknown_fields="ignore")
    answer = lenient.post(COMPLETIONS, {"prompt": "One day", "max_tokens": 1, "best": 1, "a": 2})
    assert answer.status_code == 200
    assert answer.headers["x-enginebay-ignored"] == "a, best"
    known = asker.post(COMPLETIONS, {"prompt": "One day", "max_tokens": 1, "store": False})
    assert known.status_code == 200
    assert "x-enginebay-ignored" not in known.headers


@pytest.mark.parametrize(
    ("body", "content_type", "status"),
    [
        (b"{", "application/json", 400),
        (b"[]", "application/json", 400),
        (b"null", "application/json", 400),
        (b"", "application/json", 400),
        (b"\xff\xfe", "application/json", 400),
        (b'{"prompt": "a", "temperature": NaN}', "application/json", 400),
        (b"[" * 100_000, "application/json", 400),
        (b"prompt=a", "application/x-www-form-urlencoded", 415),
        (b'{"prompt": "a"}', "text/plain", 415),
    ],
)
def test_a_body_that_is_no_json_object_is_refused(
    asker: Asker, body: bytes, content_type: str, status: int
) -> None:
    answer = asker.post(COMPLETIONS, content=body, headers={"content-type": content_type})
    error_of(answer, status)


@pytest.mark.parametrize("encoding", ["gzip", "br", "GZIP, identity"])
def test_a_compressed_body_is_refused(asker: Asker, encoding: str) -> None:
    headers = {"content-type": "application/json", "content-encoding": encoding}
    answer = asker.post(COMPLETIONS, content=gzip.compress(b'{"prompt": "a"}'), headers=headers)
    assert encoding in error_of(answer, 415)["message"]
    plain = {**headers, "content-encoding": "identity"}
    body = b'{"prompt": "a", "max_tokens": 1}'
    assert asker.post(COMPLETIONS, content=body, headers=plain).status_code == 200


def test_the_error_of_a_stream_is_its_last_event(
    asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    import json

    from enginebay.errors import StoppedError
    from enginebay.serving.events import RequestEnded
    from enginebay_server.generation import Generation
    from tests.server.in_process_client import events_of

    first = True

    async def get(generation: Generation) -> list[Any]:
        nonlocal first
        if first:
            first = False
            return await generation._events.get()
        return [RequestEnded(f"{generation.id}-0", error=StoppedError("the engine was closed"))]

    monkeypatch.setattr(Generation, "get", get)
    answer = asker.post(COMPLETIONS, {"prompt": "One day", "max_tokens": 200, "stream": True})
    *_, last = events_of(answer.text)
    assert json.loads(last)["error"]["code"] == "engine_stopped"


TOO_LONG, WRONG = "One day " * 2000, 10**6


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"prompt": TOO_LONG}, "prompt"),
        (COMPLETIONS, {"prompt": [1] * 2000}, "prompt"),
        (COMPLETIONS, {"prompt": [WRONG]}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt"),
        (COMPLETIONS, {"prompt": "\ud800"}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": TOO_LONG}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
        ("/v1/responses", {"input": TOO_LONG}, "input"),
        ("/v1/embeddings", {"input": TOO_LONG}, "input"),
        ("/v1/embeddings", {"input": [WRONG]}, "input"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
        (COMPLETIONS, {"prompt": "a", "stop_token_ids": [WRONG]}, "stop_token_ids"),
        (COMPLETIONS, {"prompt": "a", "allowed_token_ids": [WRONG]}, "allowed_token_ids"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {str(WRONG): 1}}, "logit_bias"),
        (COMPLETIONS, {"prompt": "a", "bad_words": ["once upon a time " * 20]}, "bad_words"),
        (COMPLETIONS, {"prompt": "a", "bad_words": [" "]}, "bad_words"),
        (COMPLETIONS, {"prompt": "a", "bad_words": [str(i) for i in range(300)]}, "bad_words"),
    ],
)
def test_a_refused_prompt_or_id_is_named(
    asker: Asker, path: str, fields: dict[str, Any], param: str
) -> None:
    body = json.dumps(fields)  # halves of UTF-16 pairs are escaped
    answer = asker.post(path, content=body, headers={"content-type": "application/json"})
    assert error_of(answer, 400)["param"] == param, answer.text
