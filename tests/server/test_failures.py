"""What fails inside the server: the answer, its headers and the log are those of every request."""

from __future__ import annotations

import logging
import stat
from pathlib import Path

import pytest
from starlette.responses import Response

from enginebay_server.keys import read_api_keys
from tests.server.in_process_client import HELLO, Asker, error_of

CHAT = "/v1/chat/completions"


def test_a_500_has_an_id_and_cors_headers_and_its_status_in_the_log(
    asker: Asker, caplog: pytest.LogCaptureFixture
) -> None:
    served = Asker(asker.llm, cors_origins=("https://site.example",))

    @served.app.get("/fails")
    async def fails() -> Response:
        raise ZeroDivisionError("a bug")

    caplog.set_level(logging.INFO, logger="enginebay.server")
    headers = {"x-request-id": "mine", "origin": "https://site.example"}
    answer = served.get("/fails", headers=headers)
    assert error_of(answer, 500)["code"] == "internal_error"
    assert answer.headers["x-request-id"] == "mine"
    assert answer.headers["access-control-allow-origin"] == "https://site.example"
    assert "id=mine method=GET path=/fails status=500" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_a_path_forges_nothing_in_a_log(asker: Asker, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="enginebay.server")
    asker.get("/v1/x%0a2026-11-27%20id=z%20status=200%20ms=1.0%1b%5b31m")
    [message] = [one.getMessage() for one in caplog.records if one.name == "enginebay.server"]
    assert message.isprintable()
    assert message.count(" ") == 4, "a path has no spaces, which divide the fields"
    assert message.count("status=") == 1
    assert "%0A2026-11-27%20id%3Dz" in message


def test_a_file_of_keys_that_others_can_read_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys"
    path.write_text("a-key-of-this-test")
    for mode, warns in ((0o600, False), (0o644, True), (0o640, True)):
        caplog.clear()
        path.chmod(mode)
        assert stat.S_IMODE(path.stat().st_mode) == mode
        assert read_api_keys(str(path), {}) == ("a-key-of-this-test",)
        assert ("chmod 600" in caplog.text) is warns


def test_a_panic_of_the_tokenizer_is_a_wrong_request(asker: Asker) -> None:
    """The expression tries more ways to split the text than the library allows, and panics."""
    from tokenizers import Regex, pre_tokenizers

    backend = asker.llm.tokenizer.inner.backend_tokenizer
    before = backend.pre_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex("(x+x+)+y"), "isolated"), before]
    )
    try:
        for path, body in (
            ("/tokenize", {"prompt": "x" * 60}),
            ("/v1/completions", {"prompt": "x" * 60, "max_tokens": 1}),
            (CHAT, {"messages": [{"role": "user", "content": "x" * 60}]}),
        ):
            error = asker.refused(path, 400, **body)
            assert "retry-limit-in-match" in error["message"], path
    finally:
        backend.pre_tokenizer = before
    asker.ok(CHAT, messages=HELLO, max_tokens=1)
