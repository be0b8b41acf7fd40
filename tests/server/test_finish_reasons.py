"""How answers end, whole and streamed: each choice once, for the right reason, with exact usage,
and without losing text.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.server.in_process_client import HELLO, Asker, reasons_of, text_of
from tests.server.test_tool_ends import CALL, ask

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PARSERS = {"tool_parser": "hermes", "reasoning_parser": "think"}
SAID = f"<think>Hm.</think>Sure.{CALL}"
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO},
    COMPLETIONS: {"prompt": "One day"},
}


@pytest.mark.parametrize("path", ASKED)
def test_stop_text_stop_token_end_and_length_are_told_apart(asker: Asker, path: str) -> None:
    stop_id = asker.llm.tokenizer.encode("yes and no")[-1]
    for fields, expected in (
        ({"guided_choice": ["yes and no"]}, ("stop", None)),
        ({"guided_choice": ["yes and no"], "max_tokens": 1}, ("length", None)),
        ({"guided_choice": ["yes and no"], "stop": ["x", "and"]}, ("stop", "and")),
        ({"guided_choice": ["yes and no"], "stop_token_ids": [stop_id]}, ("stop", stop_id)),
    ):
        asked = {"max_tokens": 30, **ASKED[path], **fields}
        [choice] = asker.ok(path, **asked)["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == expected
        events = asker.events(path, **asked)
        [last] = [c for e in events for c in e["choices"] if c["finish_reason"] is not None]
        assert (last["finish_reason"], last["stop_reason"]) == expected


@pytest.mark.parametrize("path", ASKED)
def test_each_choice_has_one_reason_and_usage_counts_its_tokens(asker: Asker, path: str) -> None:
    prompts = {CHAT: {}, COMPLETIONS: {"prompt": ["One day", "The cat"]}}[path]
    asked: dict[str, Any] = {
        **ASKED[path], **prompts, "n": 3, "temperature": 1.5, "seed": 11, "max_tokens": 24,
        "stop": ["a"], "logprobs": 0 if path == COMPLETIONS else True,
    }  # fmt: skip
    whole = asker.ok(path, **asked)
    told = [choice["logprobs"] for choice in whole["choices"]]
    num_tokens = sum(len(one.get("content") or one.get("tokens")) for one in told)
    assert whole["usage"]["completion_tokens"] == num_tokens
    events = asker.events(path, **asked, stream_options={"include_usage": True})
    usage = events.pop()["usage"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage[name] == whole["usage"][name]
    for choice in whole["choices"]:
        assert reasons_of(events, choice["index"]) == [choice["finish_reason"]]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert text_of(events, choice["index"]) == text
    assert {"stop", "length"} >= {choice["finish_reason"] for choice in whole["choices"]}


def test_tokens_of_the_cache_are_counted_for_each_prompt_once(asker: Asker) -> None:
    long = "Tell me about the cat and the sun. " * 12
    asked: dict[str, Any] = {"max_tokens": 2, "n": 2, "temperature": 1.0, "seed": 1}

    def cached(prompt: Any, salt: str) -> int:
        usage = asker.ok(COMPLETIONS, **asked, prompt=prompt, cache_salt=salt)["usage"]
        events = asker.events(
            COMPLETIONS, **asked, prompt=prompt, cache_salt=salt,
            stream_options={"include_usage": True},
        )  # fmt: skip
        found: int = events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert found >= usage["prompt_tokens_details"]["cached_tokens"]
        assert found < usage["prompt_tokens"]
        return found

    one = cached(long, "one")
    assert one > 0
    assert cached([long, f"One day. {long}"], "two") > one


@pytest.mark.parametrize(
    ("stop", "reasoning", "content"),
    [
        ("m.", "H", ""),
        ("</think>", "Hm.", ""),
        ("ure", "Hm.", "S"),
        ("<tool_call>", "Hm.", "Sure."),
        ('"name"', "Hm.", "Sure.<tool_call>{"),
        ("7", "Hm.", f"Sure.{CALL.partition('7')[0]}"),
    ],
)
def test_a_stop_text_within_any_part_loses_no_text_before_it(
    asker: Asker, stop: str, reasoning: str, content: str
) -> None:
    message, reason = ask(Asker(asker.llm, PARSERS), guided_choice=[SAID], stop=stop)
    assert (message["reasoning"], message["content"]) == (reasoning, content)
    assert (message["calls"], reason) == ([], "stop")


@pytest.mark.parametrize("max_tokens", [1, 4, 9, 14, 19])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_call_that_the_length_cuts_says_length_and_loses_no_text(
    asker: Asker, choice: str, max_tokens: int
) -> None:
    fields: dict[str, Any] = {"tool_choice": choice, "max_tokens": max_tokens}
    if choice == "auto":
        fields["guided_choice"] = [SAID]
    message, reason = ask(Asker(asker.llm, PARSERS), **fields)
    complete = choice == "required" and message["calls"] and message["calls"][0]["arguments"]
    assert reason == "length" or (complete and complete.endswith("}"))
    if choice == "auto":
        ids = asker.llm.tokenizer.apply_chat_template(HELLO)
        params = {"choice": [SAID], "max_tokens": max_tokens}
        written = asker.llm.generate(ids, params)[0].outputs[0].text
        assert message["reasoning"] + message["content"] == re.sub("</?think>", "", written)


@pytest.mark.parametrize("path", ASKED)
def test_usage_of_a_stream_that_is_none_is_refused(asker: Asker, path: str) -> None:
    error = asker.refused(path, 400, **ASKED[path], stream_options={"include_usage": True})
    assert error["param"] == "stream_options"


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("form", [{}, {"json_schema": {}}, {"json_schema": {"name": "a"}}])
def test_a_schema_that_is_missing_is_refused(asker: Asker, path: str, form: dict[str, Any]) -> None:
    asked = {**ASKED[path], "response_format": {"type": "json_schema", **form}}
    assert asker.refused(path, 400, **asked)["param"] == "response_format.json_schema"
