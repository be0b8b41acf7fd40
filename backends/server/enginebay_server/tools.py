"""Tools of a chat: the tools that a request offers, the call that its tool_choice demands, and the
parser of each answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
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


@dataclasses.dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that an answer may call.

    `described` is the list for the chat template, `functions` has the functions in it; both are
    empty with mode "none".
    """

    mode: ToolMode = "none"
    functions: tuple[Mapping[str, Any], ...] = ()
    described: tuple[Mapping[str, Any], ...] = ()
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
                "the model with --tool-parser or another --chat-template.",
                param="tools",
            )

    def parser(self, model: ServedModel, prompt_token_ids: Sequence[int]) -> MessageParser | None:
        """Return a parser for one answer; None if the whole text is the content."""
        if self.mode == "named":
            return MessageParser(None, NamedCallParser(str(self.functions[0]["name"])))
        if self.mode == "required":
            return MessageParser(None, CallListParser(), several=self.several)
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
        return MessageParser(reasoning, tools, several=self.several)

    def _parses_calls(self, model: ServedModel) -> bool:
        """A format that finds reasoning too is used without tools as well."""
        found = model.formats.tools
        return found is not None and (self.mode == "auto" or found.has_reasoning)


def tool_use(
    tools: Sequence[Mapping[str, Any]] | None,
    choice: str | Mapping[str, Any] | None,
    *,
    several: bool,
) -> ToolUse:
    """Read the fields `tools` and `tool_choice` of OpenAI's API; ApiError for wrong ones."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise ApiError(
                400, "tool_choice without tools. Allowed: both. Pass tools.", param="tool_choice"
            )
        return ToolUse()
    if len(tools) > MAX_TOOLS:
        raise ApiError(400, f"{len(tools)} tools. Allowed: at most {MAX_TOOLS}.", param="tools")
    functions = [_function(place, tool) for place, tool in enumerate(tools)]
    names = [function["name"] for function in functions]
    if len(set(names)) < len(names):
        raise ApiError(400, "two tools of one name. Allowed: different names.", param="tools")
    described = tuple({"type": "function", "function": function} for function in functions)
    mode: ToolMode
    if isinstance(choice, Mapping):
        mode, functions = "named", [functions[names.index(_named(choice, names))]]
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
    return ToolUse(mode, tuple(functions), described, several)


def _function(place: int, tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    is_good = tool.get("type") == "function" and isinstance(function, dict)
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


def _named(choice: Mapping[str, Any], names: Sequence[str]) -> str:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or name not in names:
        raise ApiError(
            400,
            f"tool_choice of the function {shown(name)}. Allowed: {', '.join(names)}. Name one of "
            "the tools.",
            param="tool_choice",
        )
    return name
