"""What guards a server: keys that no output shows, limits as they are set, and its flags."""

from __future__ import annotations

import asyncio
import hmac
import json
from pathlib import Path
from typing import Any

import pytest

from enginebay.errors import RequestError
from enginebay_server.errors import api_error
from tests.server.in_process_client import HELLO, Asker, error_of
from tests.server.process import ServerProcess
from tests.server.wire import ask

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
KEY = "a-secret-of-these-guards"


def test_a_key_is_compared_with_every_key_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from enginebay_server.keys import is_known

    compared: list[bytes] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append(one)
        return one == other

    monkeypatch.setattr(hmac, "compare_digest", compare)
    keys = ("first-key", "second-key", "third-key")
    for given, known in (
        ("first-key", True),
        ("third-key", True),
        ("other-key", False),
        ("", False),
    ):
        compared.clear()
        assert is_known(given, keys) is known
        assert compared == [key.encode() for key in keys], "no key is left out after a match"


def test_no_output_shows_a_key(
    asker: Asker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from enginebay.cli.program import main

    monkeypatch.setenv("ENGINEBAY_API_KEY", KEY)
    for flags in ([], ["--json"]):
        assert main(["env", *flags]) == 0
        assert KEY not in "".join(capsys.readouterr())
    guarded = Asker(asker.llm, api_keys=(KEY,))
    headers = {"authorization": f"Bearer {KEY}"}
    for path in ("/explain", "/openapi.json", "/metrics", "/readiness", "/version", "/ui/data"):
        answer = guarded.get(path, headers=headers)
        assert answer.status_code == 200, path
        assert KEY not in answer.text + str(answer.headers)


@pytest.mark.parametrize(
    ("settings", "path", "body", "param"),
    [
        ({"max_n": 2}, CHAT, {"messages": HELLO, "n": 3}, "n"),
        ({"max_n": 2}, COMPLETIONS, {"prompt": "a", "n": 3}, "n"),
        ({"max_n": 2}, COMPLETIONS, {"prompt": "a", "best_of": 3}, "best_of"),
        ({"max_prompts": 2}, COMPLETIONS, {"prompt": ["a", "b", "c"]}, "prompt"),
        ({"max_prompts": 2}, "/v1/embeddings", {"input": ["a", "b", "c"]}, "input"),
        ({"max_logprobs": 1}, COMPLETIONS, {"prompt": "a", "logprobs": 2}, "logprobs"),
        (
            {"max_logprobs": 1},
            COMPLETIONS,
            {"prompt": "a", "prompt_logprobs": 2},
            "prompt_logprobs",
        ),
        (
            {"max_logprobs": 1},
            CHAT,
            {"messages": HELLO, "logprobs": True, "top_logprobs": 2},
            "logprobs",
        ),
    ],
)
def test_a_limit_of_the_server_is_applied(
    asker: Asker, settings: dict[str, Any], path: str, body: dict[str, Any], param: str
) -> None:
    [limit] = settings.values()
    error = Asker(asker.llm, **settings).refused(path, 400, **body)
    assert error["param"] == param
    assert str(limit) in error["message"]


@pytest.mark.parametrize(
    "constraint",
    [
        {"guided_regex": "(a{1000}){1000}"},
        {"guided_regex": "a" * 2_000_000},
        {"guided_grammar": "start: " + "|".join(f'"word{i}"' for i in range(300_000))},
        {"guided_choice": ["a" * 1000 + str(i) for i in range(3000)]},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "s", "schema": {"enum": ["a" * 2_000_000]}},
            }
        },
    ],
)
def test_a_constraint_beyond_the_limits_is_refused(
    asker: Asker, constraint: dict[str, Any]
) -> None:
    error = asker.refused(CHAT, 400, messages=HELLO, max_tokens=1, **constraint)
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 1000
    asker.ok(CHAT, messages=HELLO, max_tokens=1, guided_choice=["a"])


@pytest.mark.parametrize("count", [1_999, 2_000, 10_000])
def test_as_many_choices_as_the_limit_allows_are_served(asker: Asker, count: int) -> None:
    texts = [f"it{number}" for number in range(count)]
    [choice] = asker.ok(COMPLETIONS, prompt="One", max_tokens=12, guided_choice=texts)["choices"]
    assert choice["text"] in texts


def test_more_choices_than_the_limit_are_refused_by_its_name(asker: Asker) -> None:
    texts = [f"it{number}" for number in range(10_001)]
    error = asker.refused(COMPLETIONS, 400, prompt="One", max_tokens=12, guided_choice=texts)
    assert "guided_limits.items" in error["message"]


@pytest.mark.parametrize(
    ("field", "param"), [("regex", "guided_regex"), ("temperature", "temperature")]
)
def test_an_error_names_the_field_of_the_request(field: str, param: str) -> None:
    error = RequestError(f"{field} = (", "another value", "Pass another value.")
    assert api_error(error).param == param


def test_every_layer_before_the_routes_is_pure_asgi(asker: Asker) -> None:
    from starlette.middleware.base import BaseHTTPMiddleware

    app = Asker(asker.llm, cors_origins=("https://site.example",)).app
    layers: list[Any] = [layer.cls for layer in app.user_middleware]
    assert len(layers) == 3
    assert not [layer for layer in layers if issubclass(layer, BaseHTTPMiddleware)]


def test_no_event_of_a_stream_is_written_by_pydantic(
    asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pydantic import BaseModel

    def fails(*_: object, **__: object) -> None:
        raise AssertionError("pydantic writes an event")

    for name in ("model_dump", "model_dump_json"):
        monkeypatch.setattr(BaseModel, name, fails)
    assert asker.events(CHAT, messages=HELLO, max_tokens=3)
    assert asker.events(COMPLETIONS, prompt="One day", max_tokens=3, logprobs=1)


def test_the_flags_of_a_server_reach_its_application(tmp_path: Path) -> None:
    template, keys = tmp_path / "template.jinja", tmp_path / "keys"
    template.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    keys.write_text(f"{KEY}\n")
    flags = ("--warmup", "lazy", "--log-level", "info", "--chat-template", str(template))
    names = ("--served-model-name", "small", "--api-key-file", str(keys), "--max-prompts", "1")
    with ServerProcess(*flags, *names) as server:

        def send(path: str, body: Any = None, **headers: str) -> Any:
            return asyncio.run(ask(server.url, path, body, **headers))

        assert send("/v1/models").status == 401
        key = {"authorization": f"Bearer {KEY}", "x-request-id": "mine-1"}
        models = json.loads(send("/v1/models", **key).body)["data"]
        assert [model["id"] for model in models] == ["small"]
        ids = json.loads(send("/tokenize", {"messages": HELLO}, **key).body)["tokens"]
        text = json.loads(send("/detokenize", {"tokens": ids}, **key).body)["prompt"]
        assert text.endswith("<user>Hello!")
        assert send(COMPLETIONS, {"prompt": ["a", "b"]}, **key).status == 400
    written = "".join([*server.lines, *server.errors])
    assert "id=mine-1 method=GET path=/v1/models status=200" in written
    assert "status=401" in written
    assert KEY not in written


def test_a_refusal_before_any_route_names_its_request(asker: Asker) -> None:
    answer = Asker(asker.llm, api_keys=(KEY,)).get("/v1/models", headers={"x-request-id": "mine"})
    error_of(answer, 401)
    assert answer.headers["x-request-id"] == "mine"
