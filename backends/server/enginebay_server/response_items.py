"""The items of the input of /v1/responses as the messages of a chat."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from enginebay.errors import shown
from enginebay_server.errors import ApiError
from enginebay_server.response_tools import flat_name
from enginebay_server.tools import INPUT

MessageRecord = dict[str, Any]
Item = Mapping[str, Any]

CALLS: Mapping[str, Callable[[Item], tuple[Any, Any]]] = {
    "function_call": lambda item: (
        flat_name(item.get("name"), item.get("namespace")),
        item.get("arguments", "{}"),
    ),
    "custom_tool_call": lambda item: (
        flat_name(item.get("name"), item.get("namespace")),
        json.dumps({INPUT: item.get("input", "")}),
    ),
    "local_shell_call": lambda item: ("local_shell", json.dumps(item.get("action") or {})),
    "shell_call": lambda item: ("shell", json.dumps(item.get("action") or {})),
    "apply_patch_call": lambda item: ("apply_patch", json.dumps(item.get("operation") or {})),
    "mcp_call": lambda item: (
        flat_name(item.get("name"), item.get("server_label")),
        item.get("arguments") or "{}",
    ),
}
"""Items that are calls -> the tool's name and its arguments as JSON."""

OUTPUTS = tuple(f"{name}_output" for name in CALLS if name != "mcp_call")

NOT_SHOWN = frozenset(
    {
        "web_search_call",
        "file_search_call",
        "code_interpreter_call",
        "image_generation_call",
        "mcp_list_tools",
        "mcp_approval_request",
        "mcp_approval_response",
        "tool_search_call",
        "tool_search_output",
        "additional_tools",
        "configuration_update",
        "program",
        "program_output",
    }
)
"""Items of tools that the server of an API runs, and of settings. They are not in the prompt."""

OTHER_SERVERS = "only the server that made it can read it"
IMAGES = "models here read text alone"
REFUSED_ITEMS: Mapping[str, str] = {
    "compaction": OTHER_SERVERS,
    "context_compaction": OTHER_SERVERS,
    "compaction_trigger": "this server does not shorten conversations",
    "computer_call": IMAGES,
    "computer_call_output": IMAGES,
}
"""Items that are refused, and why."""

ITEM_ID = re.compile(r"(?:msg|fc|ctc|rs)_([0-9a-f]{32})\d+")
"""The id of an item of an answer, which has the id of its response."""


def kind_of(item: Item) -> Any:
    """Return the type of an item. A message and a reference may leave it out."""
    kind = item.get("type")
    if kind is not None:
        return kind
    return "item_reference" if "id" in item and "role" not in item else "message"


def ignored_items(items: Sequence[Item]) -> set[str]:
    """Return the names, for the header of ignored fields, of items that the model does not see."""
    kinds = (kind_of(item) for item in items)
    return {f"input.{kind}" for kind in kinds if isinstance(kind, str) and kind in NOT_SHOWN}


def resolved(
    items: Sequence[Item], stored_items: Callable[[str], Sequence[Item] | None]
) -> Sequence[Item]:
    """Return items in which each reference is replaced by the item that it names. `stored_items`
    returns the output of a stored response by id. ApiError 404 for an item that is not stored.
    """
    return [
        _stored(place, item, stored_items) if kind_of(item) == "item_reference" else item
        for place, item in enumerate(items)
    ]


def _stored(place: int, item: Item, stored_items: Callable[[str], Sequence[Item] | None]) -> Item:
    named = item.get("id")
    match = ITEM_ID.fullmatch(named) if isinstance(named, str) else None
    output = stored_items(f"resp_{match[1]}") if match is not None else None
    for one in output or ():
        if one.get("id") == named:
            return one
    raise ApiError(
        404,
        f"input.{place} names the item {shown(named)}, which is not stored here. Allowed: an item "
        "of a response that is stored. Send the item itself.",
        param=f"input.{place}",
        code="item_not_found",
    )


def input_messages(items: Sequence[Item]) -> list[MessageRecord]:
    """Convert input items to the messages of a chat; ApiError for an unknown item. Calls belong to
    the assistant's message before them, and reasoning to the message or call after it.
    """
    messages: list[MessageRecord] = []
    reasoning = ""
    for place, item in enumerate(items):
        kind = kind_of(item)
        if not isinstance(kind, str):
            raise _unknown_item(place, kind)
        if kind == "message":
            messages.append({"role": item.get("role"), "content": item.get("content")})
            reasoning = _given(messages[-1], reasoning)
        elif kind in CALLS:
            _add_call(messages, item, *CALLS[kind](item), is_new=bool(reasoning))
            reasoning = _given(messages[-1], reasoning)
            if kind == "mcp_call" and (item.get("output") or item.get("error")) is not None:
                messages.append(_result(item.get("id"), item.get("output") or item["error"]))
        elif kind in OUTPUTS:
            called = item.get("call_id") or item.get("id")
            messages.append(_result(called, item.get("output")))
        elif kind == "reasoning":
            reasoning += _reasoning(place, item)
        elif kind not in NOT_SHOWN:
            raise _unknown_item(place, kind)
    return messages


def _given(message: MessageRecord, reasoning: str) -> str:
    """Give a message of the assistant the reasoning before it. Returns what is left: nothing."""
    if reasoning and message["role"] == "assistant":
        message["reasoning_content"] = reasoning
    return ""


def _reasoning(place: int, item: Item) -> str:
    """Return the text of an item of reasoning, "" where only another server can read it."""
    content = item.get("content")
    parts = [] if content is None else content
    parts = parts if isinstance(parts, list) else [None]
    given = [part.get("text") if isinstance(part, dict) else None for part in parts]
    texts = [text for text in given if isinstance(text, str)]
    if len(texts) < len(given):
        param = f"input.{place}.content"
        allowed = '[{"type": "reasoning_text", "text": ...}], or null'
        text = f"{param} = {shown(content)}. Allowed: {allowed}. Leave the item out."
        raise ApiError(400, text, param=param)
    return "".join(texts)


def _unknown_item(place: int, kind: Any) -> ApiError:
    why = REFUSED_ITEMS.get(kind) if isinstance(kind, str) else None
    because = "" if why is None else f", because {why}"
    allowed = ", ".join(("message", "reasoning", "item_reference", *CALLS, *OUTPUTS))
    return ApiError(
        400,
        f"input.{place} of type {shown(kind)}. Allowed: {allowed}{because}. Leave it out.",
        param=f"input.{place}",
    )


def _add_call(
    messages: list[MessageRecord], item: Item, name: Any, arguments: Any, *, is_new: bool
) -> None:
    """Add a call to the last message, or to a new one if `is_new` or if no other can have it."""
    called = item.get("call_id") or item.get("id")
    call = {
        "id": called,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
    if is_new or not messages or messages[-1].get("role") != "assistant":
        messages.append({"role": "assistant", "content": None})
    messages[-1].setdefault("tool_calls", []).append(call)


def _result(called: Any, output: Any) -> MessageRecord:
    return {"role": "tool", "tool_call_id": called, "content": _output_content(output)}


def _output_content(output: Any) -> Any:
    """Return the content of a result. The output of a shell is a list of commands' outputs."""
    if isinstance(output, list) and output and all(_is_shell(one) for one in output):
        return "\n".join(f"{one['stdout']}{one.get('stderr') or ''}" for one in output)
    return output


def _is_shell(one: Any) -> bool:
    return isinstance(one, dict) and isinstance(one.get("stdout"), str) and "type" not in one
