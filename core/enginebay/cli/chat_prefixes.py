"""explain --chat: how much of each prompt of a conversation repeats the prompt before it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginebay.cli.show import print_table
from enginebay.contracts.text import Tokenizer
from enginebay.errors import EnginebayError, InputError, RequestError, shown
from enginebay.json_text import parse_json

if TYPE_CHECKING:
    from enginebay.config import EngineConfig

FORMS = (
    "a JSON list of messages, the JSON body of a chat request, or a line of JSON for each body of "
    "successive requests"
)
NUM_SHOWN = 12
"""Tokens whose text is shown on each side of the first difference."""


@dataclasses.dataclass(frozen=True, slots=True)
class ChatBodyRead:
    """What a chat template reads of a chat request. `place` names the request in errors."""

    place: str
    messages: list[dict[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class FirstDifference:
    """The text before the first token that differs, and the texts from there on in the prompt of
    the turn before and in this prompt.
    """

    after: str
    before_text: str
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class PromptPrefix:
    """The prompt of a turn, compared with the prompt of the turn before."""

    turn: int
    prompt_tokens: int
    common_tokens: int
    """Number of the first tokens that both prompts have."""
    difference: FirstDifference | None
    """None for the first turn, and for a prompt that repeats the whole prompt before it."""

    @property
    def share(self) -> float:
        """The share of this prompt's tokens that are common."""
        return self.common_tokens / max(1, self.prompt_tokens)


def explain_chat(config: EngineConfig, path: str, *, as_json: bool) -> None:
    """Print the common prefixes of the successive prompts of a conversation in a file. InputError
    for a file that has none of FORMS.
    """
    requests = read_chat(path)
    from enginebay.compose.composition import make_plan

    plan = make_plan(config)
    tokenizer: Tokenizer = plan.checkpoint.load_tokenizer()
    try:
        tokenizer.limit_templates(plan.config.template_limits)
        tokenizer.read_special_tokens(plan.config.special_tokens_in_text)
        found = list(compare_prompts(tokenizer, requests))
        takes_tools = _takes_tools(tokenizer, requests[0])
    finally:
        tokenizer.close()
    if as_json:
        turns = [dataclasses.asdict(one) | {"share": one.share} for one in found]
        print(json.dumps({"turns": turns, "template_shows_tools": takes_tools}, indent=2))
        return
    rows = [
        (str(one.turn), str(one.prompt_tokens), str(one.common_tokens), f"{one.share:.1%}")
        for one in found
    ]
    notes = [() if one.difference is None else _notes(one.difference) for one in found]
    print_table(("turn", "prompt tokens", "as in the turn before", "share"), rows, notes)
    if takes_tools is False:
        print("The chat template does not show the tools, so they are not counted.")


def _notes(found: FirstDifference) -> tuple[str, ...]:
    return (
        f"both:   ... {found.after!r}",
        f"before: {found.before_text!r}",
        f"now:    {found.text!r}",
    )


def compare_prompts(
    tokenizer: Tokenizer, requests: Sequence[ChatBodyRead]
) -> Iterator[PromptPrefix]:
    """Yield the prompt of each request compared with the one before. RequestError, which names the
    request, for messages that the chat template refuses.
    """
    before: list[int] = []
    for turn, request in enumerate(requests, 1):
        token_ids = _rendered(tokenizer, request, request.tools)
        pairs = enumerate(zip(before, token_ids, strict=False))
        shorter = min(len(before), len(token_ids))
        num_common = next((place for place, (a, b) in pairs if a != b), shorter)
        difference = None
        if num_common < len(before):
            after, before_text, text = (
                tokenizer.decode(ids, skip_special_tokens=False)
                for ids in (
                    token_ids[max(0, num_common - NUM_SHOWN) : num_common],
                    before[num_common : num_common + NUM_SHOWN],
                    token_ids[num_common : num_common + NUM_SHOWN],
                )
            )
            difference = FirstDifference(after, before_text, text)
        yield PromptPrefix(turn, len(token_ids), num_common, difference)
        before = token_ids


def _rendered(tokenizer: Tokenizer, request: ChatBodyRead, tools: Any) -> list[int]:
    try:
        return tokenizer.apply_chat_template(
            request.messages, tools=tools, chat_template_kwargs=request.variables
        )
    except RequestError as error:
        raise RequestError(f"{request.place}: {error}") from None


def _takes_tools(tokenizer: Tokenizer, request: ChatBodyRead) -> bool | None:
    """Whether the template shows a request's tools; None for a request without tools."""
    if not request.tools:
        return None
    try:
        without = _rendered(tokenizer, request, None)
    except EnginebayError:
        return True
    return without != _rendered(tokenizer, request, request.tools)


def read_chat(path: str) -> list[ChatBodyRead]:
    """Return the successive requests of a conversation. A list of messages, or one body, gives a
    request for each answer of the assistant in it, and for one after its last message.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"--chat {path}: {error.strerror}", FORMS, "Pass the path of a file that can be read."
        ) from None
    except UnicodeDecodeError:
        raise InputError(f"--chat {path}, which is not UTF-8", FORMS, "Save it as UTF-8.") from None
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if len(lines) > 1 and all(line.lstrip().startswith("{") for _, line in lines):
        where = [(f"--chat {path}, line {number}", line) for number, line in lines]
        return [_body(place, _value(place, line)) for place, line in where]
    value = _value(f"--chat {path}", text)
    if isinstance(value, list) and value and all(_is_body(one) for one in value):
        return [_body(f"--chat {path}, body {n}", one) for n, one in enumerate(value, 1)]
    return _turns(_body(f"--chat {path}", value))


def _value(place: str, text: str) -> Any:
    try:
        return parse_json(text)
    except InputError as error:
        raise InputError(f"{place}: {error} The file has {FORMS}.") from None


def _is_body(value: Any) -> bool:
    return isinstance(value, dict) and "messages" in value


def _body(place: str, value: Any) -> ChatBodyRead:
    todo = "Pass the messages and tools of a request to /v1/chat/completions."
    if isinstance(value, list):
        return ChatBodyRead(place, [_message(place, n, one) for n, one in enumerate(value)])
    messages = value.get("messages") if isinstance(value, dict) else None
    if not isinstance(messages, list) or not messages:
        given = f"fields {', '.join(value) or 'none'}" if isinstance(value, dict) else shown(value)
        raise InputError(f"{place}: {given} without a list of messages", FORMS, todo)
    variables = value.get("chat_template_kwargs") or {}
    if value.get("reasoning_effort") is not None and isinstance(variables, dict):
        variables = {"reasoning_effort": value["reasoning_effort"], **variables}
    read = [_message(place, number, one) for number, one in enumerate(messages)]
    return ChatBodyRead(place, read, value.get("tools") or None, variables or None)


def _message(place: str, number: int, given: Any) -> dict[str, Any]:
    """Return a message as the server gives it to a chat template: its content is a text, and the
    arguments of calls are objects.
    """
    where = f"{place}: message {number}"
    todo = "Pass messages of /v1/chat/completions."
    if not isinstance(given, dict):
        raise InputError(f"{where} is {shown(given)}", "an object", todo)
    content = given.get("content")
    if isinstance(content, list):
        parts = [one.get("text") if isinstance(one, dict) else None for one in content]
        if not all(isinstance(one, str) for one in parts):
            raise InputError(f"{where} has a part that is no text", "parts of type text", todo)
        content = "".join(map(str, parts))
    role = {"developer": "system"}.get(str(given.get("role")), given.get("role"))
    message = {**given, "role": role, "content": "" if content is None else content}
    try:
        message |= {"tool_calls": list(map(_call, given.get("tool_calls") or ()))}
    except (AttributeError, KeyError, TypeError, InputError):
        allowed = 'calls with {"function": {"name": ..., "arguments": JSON}}'
        raise InputError(f"{where} has malformed tool_calls", allowed, todo) from None
    if not message["tool_calls"]:
        del message["tool_calls"]
    return message


def _call(given: Any) -> dict[str, Any]:
    function = dict(given["function"])
    if isinstance(function.get("arguments"), str):
        function["arguments"] = parse_json(function["arguments"] or "{}")
    return {**given, "function": function}


def _turns(body: ChatBodyRead) -> list[ChatBodyRead]:
    messages = body.messages
    ends = [place for place, one in enumerate(messages) if place and one.get("role") == "assistant"]
    if messages[-1:] and messages[-1].get("role") != "assistant":
        ends.append(len(messages))
    if not ends:
        raise InputError(f"{body.place}: no message to answer", FORMS, "Pass a user's message.")
    return [
        dataclasses.replace(body, place=f"{body.place}, turn {n}", messages=messages[:end])
        for n, end in enumerate(ends, 1)
    ]
