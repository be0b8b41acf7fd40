"""After the warm-up no request compiles a program, whatever its fields are."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax.monitoring
import pytest

from tests.server.in_process_client import HELLO, Asker, events_of

if TYPE_CHECKING:
    from enginebay import LLM

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
SETTINGS: dict[str, Any] = {
    "max_model_len": 64,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 16,
    "forbid_compiling": True,
}
WIDE = {"embeddings": True, "full_vocab_logprobs": True}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
LONG = "One day Tom saw a big cat in the park and"
FIELDS: list[dict[str, Any]] = [
    {},
    {"n": 3, "temperature": 1.0, "seed": 5},
    {"n": 5, "temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "typical_p": 0.9},
    {"presence_penalty": 1.0, "frequency_penalty": -1.0, "repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 2, "bad_words": ["cat"]},
    {"logit_bias": {"5": 3.0}, "allowed_token_ids": list(range(3, 40))},
    {"min_tokens": 2, "stop": ["a"], "stop_token_ids": [7], "ignore_eos": True},
    {"guided_choice": ["yes", "no"]},
    {"guided_regex": "[a-c]{2,4}", "temperature": 1.0, "n": 2},
    {"guided_json": SCHEMA},
    {"guided_grammar": 'start: "a" | "b"', "presence_penalty": 0.5},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
    {"priority": 3, "cache_salt": "mine", "user": "somebody"},
]
COMPLETION_FIELDS: list[dict[str, Any]] = [
    {"prompt": LONG},
    {"prompt": LONG},  # now the prefix cache has it
    {"prompt": LONG + LONG, "max_tokens": 1},
    {"prompt": [[5], [6, 7, 8], list(range(3, 40))]},
    {"prompt": [LONG] * 7, "temperature": 1.0},
    {"logprobs": 5},
    {"logprobs": 0, "n": 2},
    {"best_of": 3, "temperature": 1.0},
    {"echo": True},
    {"max_tokens": 40, "logprobs": 2, "temperature": 1.0, "frequency_penalty": 0.5},
]
WIDE_FIELDS: list[dict[str, Any]] = [
    {"prompt_logprobs": 2},
    {"logprobs": 3, "echo": True},
    {"echo": True, "max_tokens": 0},
    {"echo": True, "max_tokens": 0, "logprobs": 1, "prompt": [LONG, "a"]},
]


@pytest.fixture(scope="module", params=[{}, WIDE], ids=["usual", "wide"])
def warm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    """The demo model, with every program of its settings compiled."""
    from enginebay import LLM
    from tests.pool import few_sizes

    with few_sizes(), LLM("demo", **SETTINGS, **request.param) as made:
        made.warmup()
        yield made


def compilations(asker: Asker) -> float:
    name = 'enginebay:compilations_total{model_name="demo"} '
    [line] = [line for line in asker.get("/metrics").text.splitlines() if line.startswith(name)]
    return float(line.removeprefix(name))


@contextlib.contextmanager
def compiled() -> Iterator[list[str]]:
    """The programs that JAX compiles or reads from its cache within the block, the server's own and
    any other.
    """
    found: list[str] = []

    def listen(event: str, duration_secs: float, **named: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(str(named))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def check(asker: Asker, path: str, **body: Any) -> None:
    """The request succeeds, whole and as a stream."""
    asker.ok(path, **body)
    if "best_of" in body or path == "/v1/embeddings":
        return
    answer = asker.post(path, {**body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert '"error":{' not in answer.text
    if path in (CHAT, COMPLETIONS):
        assert [json.loads(event) for event in events_of(answer.text)[:-1]]


def test_no_request_compiles_after_the_warmup(warm: LLM) -> None:
    asker = Asker(warm, {"tool_prompt": "none"})  # the text for tools fills the context
    before = compilations(asker)
    assert before > 0
    with compiled() as programs:
        send_all(asker)
    assert not programs
    with compiled() as programs:
        jax.jit(lambda value: value * 3.5 + 1.25)(2.0)
    assert programs, "JAX reports compilations to the listener"
    assert compilations(asker) == before


def send_all(asker: Asker) -> None:
    """Send requests to every endpoint that runs the model."""
    for fields in FIELDS:
        check(asker, CHAT, messages=HELLO, **{"max_tokens": 4, **fields})
        check(asker, COMPLETIONS, **{"prompt": "a", "max_tokens": 4, **fields})
    for fields in COMPLETION_FIELDS:
        check(asker, COMPLETIONS, **{"prompt": "a", "max_tokens": 4, **fields})
    check(asker, CHAT, messages=HELLO, max_tokens=3, logprobs=True, top_logprobs=4)
    for choice in ("none", "required", {"type": "function", "function": {"name": "f"}}):
        check(asker, CHAT, messages=HELLO, max_tokens=6, tools=[TOOL], tool_choice=choice)
    check(asker, RESPONSES, input="Hello!", max_output_tokens=3, temperature=1.0)
    check(asker, "/v1/messages", messages=HELLO, max_tokens=3, top_k=2, stop_sequences=["x"])
    is_wide = asker.llm.config.embeddings
    for fields in WIDE_FIELDS:
        body = {"prompt": "a b c", "max_tokens": 2, **fields}
        if is_wide:
            check(asker, COMPLETIONS, **body)
    for given in ("a", [LONG, "b"], [[5, 6]]):
        if is_wide:
            check(asker, "/v1/embeddings", input=given)
        else:
            asker.refused("/v1/embeddings", 400, input=given)
