"""`enginebay explain --chat` compares the prompts of successive turns, and loads no weights."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from enginebay.cli.chat_prefixes import ChatBodyRead, compare_prompts, read_chat
from enginebay.errors import InputError, RequestError
from enginebay.text.tokenizer import TextTokenizer
from tests.unit.test_text import byte_level

Run = Callable[..., tuple[int, str, str]]
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "a", "content": "2"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "And now?"},
]


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    def to(text: str) -> str:
        path = tmp_path / "talk.json"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return to


def ends(requests: list[ChatBodyRead]) -> list[int]:
    return [len(one.messages) for one in requests]


def test_each_answer_of_a_conversation_is_a_turn(write: Callable[[str], str]) -> None:
    body = {"messages": TALK, "tools": [{"type": "function"}], "reasoning_effort": "low"}
    for value in (TALK, body):
        for indent in (None, 2):
            assert ends(read_chat(write(json.dumps(value, indent=indent)))) == [2, 4, 6]
    request = read_chat(write(json.dumps(body)))[2]
    assert (request.tools, request.variables) == (body["tools"], {"reasoning_effort": "low"})
    assert request.messages[1]["content"] == "Hello"
    assert request.messages[2]["content"] == ""
    assert request.messages[2]["tool_calls"][0]["function"]["arguments"] == {"x": 1}


def test_successive_bodies_are_turns_as_they_are(write: Callable[[str], str]) -> None:
    bodies = [{"messages": TALK[:2]}, {"messages": TALK}]
    assert ends(read_chat(write("\n\n".join(map(json.dumps, bodies))))) == [2, 6]
    assert ends(read_chat(write(json.dumps(bodies, indent=1)))) == [2, 6]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "not JSON"),
        ('{"a": 1', "not JSON"),
        ('{"messages": [{"role": "user", "content": "a"}]}\n{"b', "line 2: text that is not JSON"),
        ("5", "5 without a list of messages"),
        ("{}", "fields none without a list of messages"),
        ('{"input": "a"}', "fields input without a list of messages"),
        ("[]", "no message to answer"),
        ('{"messages": []}', "without a list of messages"),
        ("[7]", "message 0 is 7"),
        ('[{"role": "assistant", "content": "a"}]', "no message to answer"),
        ('[{"role": "user", "content": [{"type": "image"}]}]', "message 0 has a part"),
        ('[{"role": "user", "tool_calls": [1]}]', "message 0 has malformed tool_calls"),
        ('[{"role": "user", "tool_calls": 1}]', "message 0 has malformed tool_calls"),
    ],
)
def test_a_file_of_another_form_is_refused(
    write: Callable[[str], str], text: str, error: str
) -> None:
    with pytest.raises(InputError, match=error):
        read_chat(write(text))


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff")
    for name, error in (("none", "No such file"), ("bytes", "not UTF-8")):
        with pytest.raises(InputError, match=error):
            read_chat(str(tmp_path / name))


def test_the_first_difference_is_shown_on_both_sides() -> None:
    tokenizer = TextTokenizer(copy.copy(byte_level().inner))
    template = (
        "{% for m in messages %}<{{ m.role }}>{% if loop.last or not m.thinking %}"
        "{{ m.content }}{% endif %}{% endfor %}"
    )
    tokenizer.inner.chat_template = template
    first = ChatBodyRead("", [{"role": "user", "content": "abc", "thinking": "x"}])
    second = ChatBodyRead("", [*first.messages, {"role": "tool", "content": "d"}])
    third = ChatBodyRead("", [*second.messages, {"role": "user", "content": "e"}])
    one, two, three = compare_prompts(tokenizer, [first, second, third])
    assert (one.common_tokens, one.difference) == (0, None)
    assert two.difference is not None
    assert (two.difference.before_text, two.difference.text) == ("abc", "<tool>d")
    assert two.difference.after.endswith("<user>")
    assert two.common_tokens + len("abc") == one.prompt_tokens
    assert (three.common_tokens, three.difference) == (two.prompt_tokens, None)
    assert three.share == two.prompt_tokens / three.prompt_tokens
    bad = ChatBodyRead("line 4", [{"role": "user"}])
    with pytest.raises(RequestError, match="line 4: message 0"):
        list(compare_prompts(tokenizer, [bad]))
    strange = ChatBodyRead("", first.messages, variables=[1])  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="chat_template_kwargs of type list"):
        list(compare_prompts(tokenizer, [strange]))
    tokenizer.close()


def test_no_weights_are_loaded(
    run: Run, write: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("enginebay.compose.plan.Plan.load_weights", "enginebay_paged.engine.make_engine"):
        monkeypatch.setattr(name, lambda *_, **__: pytest.fail("weights or an engine"))
    code, out, _ = run("explain", "--chat", write(json.dumps(TALK)))
    assert (code, out.split()[0]) == (0, "turn")


def test_explain_prints_each_turn_of_a_chat(run: Run, write: Callable[[str], str]) -> None:
    body = {"messages": TALK, "tools": [{"type": "function", "function": {"name": "f"}}]}
    path = write(json.dumps(body))
    code, out, _ = run("explain", "--chat", path)
    assert code == 0
    head, first, *_ = out.splitlines()
    assert head.split()[:3] == ["turn", "prompt", "tokens"]
    assert first.split()[::2] == ["1", "0"]
    assert "The chat template does not show the tools" in out
    code, out, _ = run("explain", "--chat", path, "--json")
    found = json.loads(out)
    assert (code, found["template_shows_tools"]) == (0, False)
    assert [one["turn"] for one in found["turns"]] == [1, 2, 3]
    assert found["turns"][1]["common_tokens"] == found["turns"][0]["prompt_tokens"]
    code, _, err = run("explain", "--chat", path + ".none")
    assert (code, "No such file" in err) == (2, True)
