"""Tools for a model whose chat template has no place for them: a system text describes the tools,
and calls and results of the conversation become plain texts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from enginebay_server.tools import ToolUse

HOW_TO_CALL = (
    "You can call tools. To call one, answer with JSON alone: "
    '{"name": NAME, "arguments": ARGUMENTS}, or with a list of such objects to call several. '
    "The results follow in the next message. "
    "Without a call, answer as usual. The tools:"
)
MUST_CALL = 'Call a tool: answer with a list of {"name": NAME, "arguments": ARGUMENTS}. The tools:'
CALL_OF = "Answer with the arguments of {name} as JSON. The tools:"


def described_tools(use: ToolUse) -> str:
    """Return the text that describes the tools of a request: how to call them, and a JSON object
    with name, description and parameters for each; "" without tools.
    """
    if not use.described:
        return ""
    how = MUST_CALL if use.mode == "required" else HOW_TO_CALL
    if use.mode == "named":
        how = CALL_OF.format(name=use.functions[0]["name"])
    fields = ("name", "description", "parameters")
    tools = [
        json.dumps(
            {name: tool["function"][name] for name in fields if tool["function"].get(name)},
            ensure_ascii=False,
            separators=(",", ":"),
        )
        for tool in use.described
    ]
    return "\n".join([how, *tools])


def with_described_tools(
    messages: Sequence[Mapping[str, Any]], use: ToolUse, *, takes_system: bool
) -> list[dict[str, Any]]:
    """Return the messages of a chat, whose contents are texts, for a template without a place for
    tools.

    The tools are described at the end of the first system message, or in a new one; without
    `takes_system`, at the beginning of the first message. A call becomes the text that the model
    wrote, and results become a message of the user.
    """
    found: list[dict[str, Any]] = []
    names: dict[Any, str] = {}
    for given in messages:
        message = dict(given)
        calls = message.pop("tool_calls", None) or ()
        if calls:
            written = [_written(call["function"]) for call in calls]
            names |= {
                call.get("id"): str(call["function"].get("name"))
                for call in calls
                if isinstance(call.get("id"), str)
            }
            text = written[0] if len(written) == 1 else f"[{', '.join(written)}]"
            message["content"] = "\n".join(filter(None, (message["content"], text)))
        follows_result = bool(found) and "is_result" in found[-1]
        if message["role"] == "tool":
            text = _result(message, names)
            message = {"role": "user", "content": text, "is_result": True}
        if follows_result and message["role"] == "user":
            found[-1]["content"] += f"\n\n{message['content']}"
            continue
        found.append(message)
    for message in found:
        message.pop("is_result", None)
    text = described_tools(use)
    return _with_system(found, text, takes_system=takes_system) if text else found


def _written(function: Mapping[str, Any]) -> str:
    call = {"name": function.get("name"), "arguments": function.get("arguments") or {}}
    return json.dumps(call, ensure_ascii=False)


def _result(message: Mapping[str, Any], names: Mapping[Any, str]) -> str:
    called = message.get("tool_call_id")
    name = names.get(called) if isinstance(called, str) else None
    name = name or message.get("name")
    return f"Result of {name}:\n{message['content']}" if name else f"Result:\n{message['content']}"


def _with_system(
    messages: list[dict[str, Any]], text: str, *, takes_system: bool
) -> list[dict[str, Any]]:
    if not messages:
        return messages
    first = messages[0]
    if first["role"] == "system":
        joined = "\n\n".join(filter(None, (first["content"], text)))
        return [{**first, "content": joined}, *messages[1:]]
    if takes_system or first["role"] != "user":
        return [{"role": "system", "content": text}, *messages]
    return [{**first, "content": f"{text}\n\n{first['content']}"}, *messages[1:]]
