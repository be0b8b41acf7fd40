"""Messages of a chat as chat templates expect them: contents are texts, and arguments of tool
calls are objects.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from enginebay.errors import shown
from enginebay_server.errors import ApiError

ROLES = {"developer": "system"}
"""Roles with another name in chat templates."""

SYSTEM_ROLES = ("system", "developer")

TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""The types of parts of a content that are text, and the field that has the text."""


def as_messages(given: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages for a chat template; ApiError names the field of a malformed one."""
    return [_message(place, one) for place, one in enumerate(given)]


def _message(place: int, given: Mapping[str, Any]) -> dict[str, Any]:
    role = given.get("role")
    if not isinstance(role, str) or not role:
        raise ApiError(
            400,
            f"message {place} with role {shown(role)}. Allowed: a name such as user, assistant, "
            "system or tool. Pass one.",
            param=f"messages.{place}.role",
        )
    message = {**given, "role": ROLES.get(role, role)}
    message["content"] = content_text(given.get("content"), f"messages.{place}.content")
    if given.get("tool_calls"):
        message["tool_calls"] = _calls(given["tool_calls"], f"messages.{place}.tool_calls")
    return message


def content_text(content: Any, param: str) -> str:
    """Return the text of a content, which is a text, null, or a list of text parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        given = f"a {type(content).__name__}"
        raise ApiError(
            400, f"{param} is {given}. Allowed: a text, or parts of type text.", param=param
        )
    texts = []
    for number, part in enumerate(content):
        field = TEXT_PARTS.get(str(part.get("type"))) if isinstance(part, dict) else None
        text = None if field is None else part.get(field)
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise ApiError(
                400,
                f"{param}.{number} of type {shown(kind)}. Allowed: text. Models here read text "
                "alone.",
                param=f"{param}.{number}",
            )
        texts.append(text)
    return "".join(texts)


def with_one_system(
    messages: Sequence[Mapping[str, Any]], first: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Return messages that begin with one system message: the texts of `first`, and those of the
    messages of the roles system and developer, in this order. ApiError for a malformed content.
    """
    texts, others = list(first), []
    for place, message in enumerate(messages):
        if message.get("role") in SYSTEM_ROLES:
            texts.append(content_text(message.get("content"), f"messages.{place}.content"))
        else:
            others.append(dict(message))
    found = "\n\n".join(filter(None, texts))
    return [{"role": "system", "content": found}, *others] if found else others


def _calls(given: Any, param: str) -> list[dict[str, Any]]:
    """Return tool calls with their arguments as objects; clients send them as JSON texts."""
    try:
        calls = []
        for call in given:
            if call.get("type") == "custom":
                called = call["custom"]
                function = {"name": called["name"], "arguments": {"input": called["input"]}}
                calls.append({"id": call.get("id"), "type": "function", "function": function})
                continue
            function = dict(call["function"])
            if isinstance(function.get("arguments"), str):
                function["arguments"] = json.loads(function["arguments"] or "{}")
            calls.append({**call, "function": function})
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ApiError(
            400,
            f'{param} is malformed. Allowed: a list of {{"id": ..., "type": "function", '
            '"function": {"name": ..., "arguments": JSON}}. Pass such a list.',
            param=param,
        ) from None
    return calls
