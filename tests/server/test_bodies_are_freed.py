"""A body is freed with its answer: nothing waits for the garbage collection, which comes seldom."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from enginebay.errors import EnginebayError
from enginebay_server.bodies import Body
from tests.server.in_process_client import HELLO, Asker

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WAIT_S = 5.0
KEEPS = Body, EnginebayError
LONG = "a " * 2**17
ANSWERED: dict[str, Any] = {"messages": HELLO, "max_tokens": 1}
FEW: dict[str, Any] = {"prompt": [20, 21], "max_tokens": 2}
BODIES: dict[str, tuple[str, bytes, int]] = {
    "too many values": (CHAT, b"[" + b"[]," * 2**18 + b"[]]", 400),
    "no JSON": (CHAT, b"{" * 2**17, 400),
    "a wrong field": (CHAT, json.dumps({**ANSWERED, "user": [[]] * 2**17}).encode(), 400),
    "an unknown field": (CHAT, json.dumps({**ANSWERED, "none": LONG}).encode(), 400),
    "a long text": (COMPLETIONS, json.dumps({"prompt": LONG * 8}).encode(), 400),
    "a long prompt": (COMPLETIONS, json.dumps({"prompt": LONG}).encode(), 400),
    "a refused value": (CHAT, json.dumps({**ANSWERED, "logit_bias": {"9999": 1}}).encode(), 400),
    "no grammar": (COMPLETIONS, json.dumps({**FEW, "guided_grammar": "x"}).encode(), 400),
    "an unknown model": (COMPLETIONS, json.dumps({**FEW, "model": "x"}).encode(), 404),
    "an answer": (COMPLETIONS, json.dumps({**FEW, "user": "a" * 1000}).encode(), 200),
    "a stream": (COMPLETIONS, json.dumps({**FEW, "stream": True}).encode(), 200),
    "a refused stream": (
        COMPLETIONS,
        json.dumps({**FEW, "stream": True, "logit_bias": {"9999": 1}}).encode(),
        400,
    ),
    "a long input": ("/v1/responses", json.dumps({"input": LONG * 8}).encode(), 400),
    "a long message": (
        "/v1/messages",
        json.dumps({"max_tokens": 1, "messages": [{"role": "user", "content": LONG * 8}]}).encode(),
        400,
    ),
    "a text to embed": ("/v1/embeddings", json.dumps({"input": LONG}).encode(), 400),
    "a text to count": ("/v1/count_tokens", json.dumps({"prompt": LONG * 8}).encode(), 400),
    "unknown tokens": ("/detokenize", json.dumps({"tokens": [10**6] * 2**16}).encode(), 400),
    "tokens of a text": ("/tokenize", json.dumps({"prompt": LONG[:100_000]}).encode(), 200),
}


def alive() -> list[Any]:
    """The bodies and errors that something still refers to."""
    return [one for one in gc.get_objects() if isinstance(one, KEEPS)]


@pytest.fixture
def _uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_uncollected")
@pytest.mark.parametrize("name", BODIES)
def test_a_body_is_freed_with_its_answer(asker: Asker, name: str) -> None:
    path, content, status = BODIES[name]
    before = alive()  # those of a test that failed stay with its traceback
    answer = asker.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text[:500]
    until_s = time.monotonic() + WAIT_S
    while kept := [type(o).__name__ for o in alive() if not any(o is one for one in before)]:
        assert time.monotonic() < until_s, kept  # a lane's thread may still be leaving its frames
        time.sleep(0.01)
