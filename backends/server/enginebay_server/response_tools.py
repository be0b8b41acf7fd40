"""The tools of /v1/responses as those of a chat, and the names of their calls in an answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from enginebay.errors import shown
from enginebay_server.errors import ApiError
from enginebay_server.tools import KINDS, left_out

NAMESPACE = "namespace"
_SEPARATOR = "__"


def flat_name(name: Any, namespace: Any) -> Any:
    """Return the name that a model knows a tool by: NAMESPACE__NAME for a tool of a namespace."""
    if not isinstance(namespace, str) or not namespace or not isinstance(name, str):
        return name
    return f"{namespace.rstrip('_')}{_SEPARATOR}{name}"


@dataclasses.dataclass(frozen=True, slots=True)
class CallNames:
    """What the calls of an answer are: of custom tools, or of tools in a namespace."""

    custom: frozenset[str] = frozenset()
    namespaces: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    """The name that the model knows -> namespace and name."""

    def fields(self, name: str) -> dict[str, str]:
        """Return the fields of an item that name the tool of a call."""
        if name not in self.namespaces:
            return {"name": name}
        namespace, own = self.namespaces[name]
        return {"name": own, "namespace": namespace}


def call_names(tools: Sequence[Mapping[str, Any]] | None) -> CallNames:
    """Return the names of the calls that an answer with these tools may have."""
    each = list(_each(tools or ()))
    return CallNames(
        frozenset(
            flat_name(tool.get("name"), namespace)
            for namespace, tool in each
            if tool.get("type") == "custom" and isinstance(tool.get("name"), str)
        ),
        {
            flat_name(tool["name"], namespace): (namespace, tool["name"])
            for namespace, tool in each
            if namespace and isinstance(tool.get("name"), str)
        },
    )


def ignored_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[str]:
    """Return the names, for the header of ignored fields, of tools that the server cannot run."""
    return left_out(tool for _, tool in _each(tools or ()))


def _each(tools: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each tool with its namespace, which is "" for a tool outside of namespaces."""
    for place, tool in enumerate(tools):
        if tool.get("type") != NAMESPACE:
            yield "", tool
            continue
        name, inner = tool.get("name"), tool.get("tools")
        is_good = isinstance(name, str) and bool(name) and isinstance(inner, list)
        if not is_good or not all(isinstance(one, dict) for one in inner or ()):
            raise ApiError(
                400,
                f"tools.{place} is malformed. Allowed: "
                '{"type": "namespace", "name": ..., "tools": [...]}.',
                param=f"tools.{place}",
            )
        for one in inner or ():
            yield str(name), one


def chat_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Convert tools to the format of the chat API; the field `strict` is ignored."""
    return None if tools is None else [_tool(tool, name) for name, tool in _each(tools)]


def _tool(given: Mapping[str, Any], namespace: str) -> dict[str, Any]:
    kind = given.get("type")
    if not isinstance(kind, str):
        raise ApiError(
            400,
            f"a tool of type {shown(kind)}. Allowed: function, custom or namespace. Leave it out.",
            param="tools",
        )
    if kind not in KINDS:
        return {"type": kind}
    fields = ("description", "parameters") if kind == "function" else ("description", "format")
    tool = {name: given[name] for name in fields if given.get(name) is not None}
    return {"type": kind, kind: {"name": flat_name(given.get("name"), namespace), **tool}}


def chat_choice(given: str | Mapping[str, Any] | None) -> str | dict[str, Any] | None:
    """Convert a tool_choice to that of the chat API."""
    if not isinstance(given, Mapping):
        return given
    kind = given.get("type")
    if kind == "allowed_tools":
        tools = given.get("tools")
        if isinstance(tools, list):
            tools = [chat_choice(one) for one in tools]
        mode = {"mode": given["mode"]} if "mode" in given else {}
        return {"type": kind, "allowed_tools": {**mode, "tools": tools}}
    if isinstance(kind, str) and kind not in KINDS:
        return {"type": kind}
    kind = kind if kind in KINDS else "function"
    return {"type": kind, kind: {"name": flat_name(given.get("name"), given.get(NAMESPACE))}}
