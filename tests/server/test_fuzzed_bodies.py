"""Whatever the fields of a body are, the answer is a success or names what is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server.in_process_client import HELLO, Asker

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 30),
    st.sampled_from([2**31, 2**63, 2**64, 10**30, -(10**30), 0.5, -0.0, 1e308, 10**400]),
    st.sampled_from(
        ["", "a", "\ud800", "\x00", "0", "auto", "required", "json_object", "a" * 3000]
    ),
    st.sampled_from([[], ["a"], ["\udfff"], [5, 6], [[5], [6]], [10**30], [None], [[]]]),
    st.sampled_from(
        [{}, {"\ud800": 1}, {"5": 1.0}, {"9" * 5000: 1}, {"type": "json_object"}, {"role": "user"}]
    ),
    st.just([{"role": "user", "content": "\ud800"}]),
    st.just([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]),
    st.just({"type": "json_schema", "json_schema": {"schema": {"type": "\ud800"}}}),
)
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 1},
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/v1/messages": {"messages": HELLO, "max_tokens": 1},
    "/v1/embeddings": {"input": "a"},
    "/v1/count_tokens": {"prompt": "a"},
    "/tokenize": {"messages": HELLO},
    "/detokenize": {"tokens": [5]},
}


def fields_of(asker: Asker, path: str) -> list[str]:
    """The fields of a path's body, as the server's own document has them."""
    document = asker.app.openapi()
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    schema = document["components"]["schemas"][body["$ref"].rpartition("/")[2]]
    return sorted(schema["properties"].keys() - {"max_tokens", "max_completion_tokens", "n"})


@pytest.mark.parametrize("path", BODIES)
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_no_body_makes_the_server_fail(asker: Asker, path: str, data: st.DataObject) -> None:
    names = st.sampled_from([*fields_of(asker, path), "\ud800"])
    changed = data.draw(st.dictionaries(names, VALUES, min_size=1, max_size=2))
    content = json.dumps({**BODIES[path], **changed})
    answer = asker.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code < 500 or "event-stream" in answer.headers["content-type"], (
        answer.text,
        changed,
    )
    assert "server_error" not in answer.text, changed
