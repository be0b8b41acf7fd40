"""Tools of a chat: the tools that a request offers, the call that its tool_choice demands, and the
parser of each answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from enginebay.contracts.output_format import Parser, ParseRequest
from enginebay.errors import shown
from enginebay_server.errors import ApiError
from enginebay_server.field_limits import MAX_TOOLS
from enginebay_server.parsing.constrained import (
    CallListParser,
    NamedCallParser,
    arguments_schema,
    calls_schema,
)
from enginebay_server.parsing.message import MessageParser
from enginebay_server.parsing.schema_types import SchemaTypes
from enginebay_server.served import ServedModel

ToolMode = Literal["none", "auto", "required", "named"]

KINDS = ("function", "custom")
"""The types of tools that a client runs. Tools of other types would be run by the server of an API,
so they are left out.
"""

INPUT = "input"
"""The one argument of a custom tool, which is a text."""


@dataclasses.dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that an answer may call.

    `described` is the list for the chat template, `functions` has the functions in it; both are
    empty with mode "none".
    """

    mode: ToolMode = "none"
    functions: tuple[Mapping[str, Any], ...] = ()
    described: tuple[Mapping[str, Any], ...] = ()
    custom: frozenset[str] = frozenset()
    """The names of the custom tools among the functions, whose argument is a text."""
    several: bool = True
    """Whether an answer may have more than one call."""
    is_guided: bool = False
    """Whether the answer has a form from its first token on. Then it goes on with no reasoning that
    the prompt has begun.
    """

    @property
    def schema(self) -> dict[str, Any] | None:
        """The JSON schema of the output; None for any text."""
        if self.mode == "named":
            return arguments_schema(self.functions[0])
        if self.mode == "required":
            return calls_schema(self.functions, several=self.several)
        return None

    def keeps_special_tokens(self, model: ServedModel) -> bool:
        """Whether the output must be decoded with special tokens for its parser."""
        formats = model.formats
        used = (formats.tools if self._parses_calls(model) else None, formats.reasoning)
        is_free = self.mode in ("none", "auto")
        return is_free and any(one is not None and one.keeps_special_tokens for one in used)

    def is_cut(self, stopped_by: str | int | None) -> bool:
        """Return whether the end of an answer has cut off a call.

        A demanded call ends by itself, so a stop text cuts it off.
        """
        return self.schema is not None and stopped_by is not None

    def check(self, model: ServedModel) -> None:
        """Raise ApiError for tools that the chat template does not show to the model."""
        if self.mode == "auto" and model.formats.lacks_tools:
            raise ApiError(
                400,
                f"tools for {model.name}, whose chat template has no place for them. Allowed: "
                "tool_choice required, the name of a tool, or none. Pass one of these, or serve "
                "the model with --tool-prompt auto, --tool-parser or another --chat-template.",
                param="tools",
            )

    def parser(self, model: ServedModel, prompt_token_ids: Sequence[int]) -> MessageParser | None:
        """Return a parser for one answer; None if the whole text is the content."""
        if self.mode == "named":
            parser: Parser = NamedCallParser(str(self.functions[0]["name"]))
            return MessageParser(None, parser, custom=self.custom)
        if self.mode == "required":
            return MessageParser(None, CallListParser(), several=self.several, custom=self.custom)
        formats = model.formats
        decode = model.llm.tokenizer.decode
        shown_ids = () if self.is_guided else prompt_token_ids
        request = ParseRequest(
            formats.chat,
            self.functions,
            lambda count: decode(shown_ids[-count:], skip_special_tokens=False),
        )
        tools: Parser | None = None
        if formats.tools is not None and self._parses_calls(model):
            tools = formats.tools.make_parser(request)
        reasoning = None if formats.reasoning is None else formats.reasoning.make_parser(request)
        if tools is None and reasoning is None:
            return None
        return MessageParser(reasoning, tools, several=self.several, custom=self.custom)

    def _parses_calls(self, model: ServedModel) -> bool:
        """A format that finds reasoning too is used without tools as well."""
        found = model.formats.tools
        return found is not None and (self.mode == "auto" or found.has_reasoning)


def left_out(tools: Iterable[Mapping[str, Any]] | None) -> list[str]:
    """Return the names, for the header of ignored fields, of tools that the server cannot run."""
    return sorted({f"tools.{tool['type']}" for tool in tools or () if not _is_ours(tool)})


def _is_ours(tool: Mapping[str, Any]) -> bool:
    """Return whether a tool is described to the model. A malformed one is refused later."""
    return not isinstance(tool.get("type"), str) or tool["type"] in KINDS


def tool_use(
    tools: Sequence[Mapping[str, Any]] | None,
    choice: str | Mapping[str, Any] | None,
    *,
    several: bool,
) -> ToolUse:
    """Read the fields `tools` and `tool_choice` of OpenAI's API. Raises ApiError for wrong ones,
    and for a choice that demands a tool which is left out.
    """
    if tools and len(tools) > MAX_TOOLS:
        raise ApiError(400, f"{len(tools)} tools. Allowed: at most {MAX_TOOLS}.", param="tools")
    ours = [(place, tool) for place, tool in enumerate(tools or ()) if _is_ours(tool)]
    if not ours:
        if choice not in (None, "none", "auto"):
            raise _no_tools(tools, choice)
        return ToolUse()
    functions = [_function(place, tool) for place, tool in ours]
    names = [function["name"] for function in functions]
    if len(set(names)) < len(names):
        raise ApiError(400, "two tools of one name. Allowed: different names.", param="tools")
    custom = frozenset(
        name for name, (_, tool) in zip(names, ours, strict=True) if tool["type"] == "custom"
    )
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        allowed = _allowed(choice)
        kept = {_named(one, names, tools) for one in allowed["tools"] if _is_ours(one)}
        functions = [one for one in functions if one["name"] in kept]
        choice = allowed.get("mode", "auto")
        if not functions:
            raise _no_tools(tools, choice)
    described = tuple({"type": "function", "function": function} for function in functions)
    mode: ToolMode
    if isinstance(choice, Mapping):
        mode, functions = "named", [functions[names.index(_named(choice, names, tools))]]
    elif choice in (None, "auto"):
        mode = "auto"
    elif choice == "required":
        mode = "required"
    elif choice == "none":
        return ToolUse()
    else:
        raise ApiError(
            400,
            f"tool_choice = {shown(choice)}. Allowed: none, auto, required, or "
            '{"type": "function", "function": {"name": ...}}. Pass one of these.',
            param="tool_choice",
        )
    return ToolUse(mode, tuple(functions), described, custom, several)


def _no_tools(tools: Sequence[Mapping[str, Any]] | None, choice: Any) -> ApiError:
    """Return the error of a choice that demands a call while there is nothing to call."""
    if not tools:
        return ApiError(
            400, "tool_choice without tools. Allowed: both. Pass tools.", param="tool_choice"
        )
    return ApiError(
        400,
        f"tool_choice = {shown(choice)} without a tool that the client runs. This server runs no "
        f"tools itself, and leaves out {', '.join(left_out(tools))}. Allowed: auto or none. Leave "
        "tool_choice out, or pass a tool of type function.",
        param="tool_choice",
    )


def _allowed(choice: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the mode and the tools of a choice of allowed tools."""
    given = choice.get("allowed_tools")
    tools = given.get("tools") if isinstance(given, dict) else None
    if not isinstance(given, dict) or not isinstance(tools, list) or not tools:
        raise ApiError(
            400,
            "tool_choice of type allowed_tools is malformed. Allowed: "
            '{"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [...]}}.',
            param="tool_choice",
        )
    if given.get("mode", "auto") not in ("auto", "required", "none"):
        raise ApiError(
            400,
            f"tool_choice with the mode {shown(given['mode'])}. Allowed: auto or required.",
            param="tool_choice",
        )
    wrong = next((one for one in tools if not isinstance(one, dict)), None)
    if wrong is not None:
        raise ApiError(
            400, f"an allowed tool is {shown(wrong)}. Allowed: an object.", param="tool_choice"
        )
    return given


def _function(place: int, tool: Mapping[str, Any]) -> Mapping[str, Any]:
    kind = tool.get("type")
    function = tool.get(kind) if kind in KINDS else None
    is_good = isinstance(function, dict)
    name = function.get("name") if isinstance(function, dict) else None
    parameters = function.get("parameters") if isinstance(function, dict) else None
    is_good = is_good and isinstance(name, str) and bool(name)
    if not is_good or not isinstance(parameters, dict | None):
        raise ApiError(
            400,
            f'tools.{place} is malformed. Allowed: {{"type": "function", "function": {{"name": '
            '..., "description": ..., "parameters": SCHEMA}}. Pass such a function.',
            param=f"tools.{place}",
        )
    assert isinstance(function, dict), "it was checked above"
    if kind == "custom":
        return _custom(place, function)
    types = SchemaTypes(parameters).types()
    if "object" not in types:
        given = ", ".join(sorted(types)) or shown((parameters or {}).get("type"))
        raise ApiError(
            400,
            f"tools.{place}.function.parameters of type {given}. Allowed: object, because the "
            'arguments of a call are an object. Pass "object", or leave it out.',
            param=f"tools.{place}.function.parameters.type",
        )
    return function


def _custom(place: int, tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a custom tool as a function of one text. A grammar is part of its description."""
    form = tool.get("format") or {"type": "text"}
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "grammar":
        form = form.get("grammar") or form  # chats have the grammar in an object of its own
    definition = form.get("definition") if kind == "grammar" else ""
    if kind not in ("text", "grammar") or not isinstance(definition, str):
        raise ApiError(
            400,
            f"tools.{place} has the format {shown(form)}. Allowed: "
            '{"type": "text"} or {"type": "grammar", "syntax": ..., "definition": ...}.',
            param=f"tools.{place}",
        )
    what = "The text that the tool reads."
    if definition:
        what += f" It follows this {form.get('syntax', '')} grammar:\n{definition}"
    return {
        "name": tool["name"],
        "description": tool.get("description") or "",
        "parameters": {
            "type": "object",
            "properties": {INPUT: {"type": "string", "description": what}},
            "required": [INPUT],
            "additionalProperties": False,
        },
    }


def _named(
    choice: Mapping[str, Any],
    names: Sequence[str],
    tools: Sequence[Mapping[str, Any]] | None,
) -> str:
    if not _is_ours(choice):
        raise _no_tools(tools, choice)
    kind = "custom" if choice.get("type") == "custom" else "function"
    function = choice.get(kind)
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or name not in names:
        raise ApiError(
            400,
            f"tool_choice of the function {shown(name)}. Allowed: {', '.join(names)}. Name one of "
            "the tools.",
            param="tool_choice",
        )
    return name
