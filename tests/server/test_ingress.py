"""Ingress: keys, sizes and speed of bodies, draining, request ids, other sites, and the log."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from enginebay.errors import ConfigError, InputError
from enginebay_server.keys import is_known, read_api_keys
from enginebay_server.settings import ServerSettings
from tests.server.in_process_client import HELLO, Asker, error_of

COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {"prompt": "One day", "max_tokens": 1}
KEY = "a-secret-of-this-test"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer another-secret"},
        {"authorization": "Bearer "},
        {"authorization": KEY},
        {"authorization": f"Basic {KEY}"},
        {"x-api-key": KEY[:-1]},
    ],
)
def test_a_request_without_a_known_key_is_refused(
    asker: Asker, headers: Mapping[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    guarded = Asker(asker.llm, api_keys=("first-secret", KEY))
    with caplog.at_level(logging.DEBUG):
        for path in (COMPLETIONS, "/v1/nothing"):
            answer = guarded.post(path, BODY, headers=headers)
            error = error_of(answer, 401)
            assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
            assert answer.headers["www-authenticate"] == "Bearer"
        assert guarded.get("/metrics", headers=headers).status_code == 401
        assert guarded.get("/health", headers=headers).status_code == 200
    assert KEY not in caplog.text
    assert KEY not in repr(guarded.state.settings)


@pytest.mark.parametrize(
    "headers",
    [{"authorization": f"Bearer {KEY}"}, {"authorization": f"bearer {KEY}"}, {"x-api-key": KEY}],
)
def test_a_known_key_opens(
    asker: Asker, headers: Mapping[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    guarded = Asker(asker.llm, api_keys=("first-secret", KEY))
    with caplog.at_level(logging.DEBUG):
        assert guarded.post(COMPLETIONS, BODY, headers=headers).status_code == 200
    assert KEY not in caplog.text


@pytest.mark.parametrize("keys", [(), ("a-stand-in",)])
def test_a_replica_takes_the_key_of_its_proxy_and_documents_those_of_clients(
    asker: Asker, keys: tuple[str, ...]
) -> None:
    replica = Asker(asker.llm, api_keys=keys, front_key=KEY)
    for wrong in ("", "a-stand-in"):
        error_of(replica.post(COMPLETIONS, BODY, headers={"x-api-key": wrong}), 401)
    document = replica.get("/openapi.json", headers={"x-api-key": KEY}).json()
    completions = document["paths"][COMPLETIONS]["post"]
    assert ("security" in completions) == ("401" in completions["responses"]) == bool(keys)
    assert KEY not in repr(replica.state.settings)


def test_keys_come_from_a_file_and_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of two users\nkey-of-the-first\n\n  key-of-the-second  \n")
    variable = {"ENGINEBAY_API_KEY": "key-of-the-third"}
    keys = read_api_keys(str(file), variable)
    assert keys == ("key-of-the-first", "key-of-the-second", "key-of-the-third")
    assert read_api_keys(None, {}) == ()
    assert is_known("key-of-the-second", keys)
    assert not is_known("key-of-the-fourth", keys)
    assert not is_known("schl\u00fcssel", keys)


@pytest.mark.parametrize("text", [None, "", "# none\n", "short\n", "with a space in it\n"])
def test_a_file_without_a_good_key_is_refused_and_not_shown(
    tmp_path: Path, text: str | None
) -> None:
    file = tmp_path / "keys"
    if text is not None:
        file.write_text(text)
    with pytest.raises(InputError) as caught:
        read_api_keys(str(file), {})
    assert str(file) in str(caught.value)
    assert not text or text.strip("# \n") not in str(caught.value).replace("none", "")


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_n", 0), ("max_queue", -1), ("request_timeout_s", 0), ("max_logprobs", 21),
     ("drain_timeout_s", float("nan"))],
)  # fmt: skip
def test_settings_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} = "):
        ServerSettings(**{name: value})


def test_a_body_that_is_too_large_is_refused(asker: Asker) -> None:
    small = Asker(asker.llm, max_body_bytes=100)
    answer = small.post(COMPLETIONS, {**BODY, "prompt": "a" * 100})
    assert error_of(answer, 413)["code"] == "request_too_large"
    assert answer.headers["connection"] == "close"

    num_sent = 0

    async def parts() -> Any:
        nonlocal num_sent
        for _ in range(20):
            num_sent += 1
            yield b" " * 10

    chunked = small.post(COMPLETIONS, content=parts(), headers={"content-type": "application/json"})
    error_of(chunked, 413)
    assert num_sent == 20, "the client could end its body, and so reads the answer"
    assert small.post(COMPLETIONS, BODY).status_code == 200


def test_a_body_that_is_too_slow_is_refused(asker: Asker) -> None:
    hasty = Asker(asker.llm, body_timeout_s=0.1)

    async def parts() -> Any:
        yield b"{"
        await asyncio.sleep(30)
        yield b"}"

    answer = hasty.post(COMPLETIONS, content=parts(), headers={"content-type": "application/json"})
    error_of(answer, 408)


def test_a_server_that_ends_takes_nothing_new(asker: Asker) -> None:
    asker.state.is_draining = True
    answer = asker.post(COMPLETIONS, BODY)
    assert error_of(answer, 503)["code"] == "server_draining"
    assert "retry-after" in answer.headers
    assert asker.get("/readiness").status_code == 503
    assert asker.get("/health").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_the_line_of_a_request_has_its_model_and_tokens(
    asker: Asker, caplog: pytest.LogCaptureFixture, *, stream: bool
) -> None:
    with caplog.at_level(logging.INFO, "enginebay.server"):
        body = {"model": "demo", "prompt": [20, 21, 22], "max_tokens": 5, "stream": stream}
        asker.post(COMPLETIONS, body | {"ignore_eos": True, "n": 2})
        asker.post(COMPLETIONS, {"model": "none such", "prompt": "a"})
        asker.get("/v1/models")
    ran, refused, listed = (record.getMessage() for record in caplog.records)
    assert re.fullmatch(
        r"id=[0-9a-f]{32} method=POST path=/v1/completions status=200 seconds=[0-9]+\.[0-9]{4} "
        "model=demo prompt_tokens=3 completion_tokens=10",
        ran,
    )
    assert re.fullmatch(r"id=\S+ method=POST path=\S+ status=404 seconds=[0-9.]+", refused)
    assert "model=" not in listed


def test_every_answer_has_a_request_id(asker: Asker, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "enginebay.server"):
        named = asker.post(COMPLETIONS, BODY, headers={"x-request-id": "mine-7"})
        assert named.headers["x-request-id"] == "mine-7"
        assert "id=mine-7 method=POST path=/v1/completions status=200" in caplog.text
        unsafe = asker.post(COMPLETIONS, BODY, headers={"x-request-id": "a b\tc"})
        assert len(unsafe.headers["x-request-id"]) == 32
        assert asker.get("/v1/nothing").headers["x-request-id"]
    assert "One day" not in caplog.text


def test_other_sites_may_ask_only_where_they_are_named(asker: Asker) -> None:
    site = "https://site.example"
    ask = {
        "origin": site,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
    name = "access-control-allow-origin"
    assert name not in asker.post(COMPLETIONS, BODY, headers={"origin": site}).headers
    open_ = Asker(asker.llm, cors_origins=(site,), api_keys=(KEY,))
    preflight = open_.all(("OPTIONS", COMPLETIONS, {"headers": ask}))[0]
    assert (preflight.status_code, preflight.headers[name]) == (200, site)
    other = {**ask, "origin": "https://other.example"}
    assert name not in open_.all(("OPTIONS", COMPLETIONS, {"headers": other}))[0].headers


def test_two_applications_share_nothing(asker: Asker) -> None:
    other = Asker(asker.llm, api_keys=(KEY,))
    other.state.is_draining = True
    assert asker.ok("/v1/chat/completions", messages=HELLO, max_tokens=1)
    assert asker.state.metrics.of["demo"].num_ended["length"] == 1
    assert other.state.metrics.of["demo"].num_ended["length"] == 0
