"""The contract of output formats: how a kind of models writes tool calls or reasoning, and the
parser that finds them in generated text.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias


@dataclasses.dataclass(frozen=True, slots=True)
class ContentDelta:
    """Further text of the answer."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Further text of the reasoning that comes before the answer."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The start of a tool call. The calls of one completion are numbered from 0, and their ids
    differ.
    """

    index: int
    id: str
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class ToolArgumentsDelta:
    """Further text of a call's arguments. All such texts of a call make a JSON object."""

    index: int
    text: str


Delta: TypeAlias = ContentDelta | ReasoningDelta | ToolCallStart | ToolArgumentsDelta


class Parser(ABC):
    """Parses the text of one completion, which comes in pieces of any size.

    Invariants (held by `enginebay_testing.output_formats`): joined, the deltas do not depend on how
    the text is cut into pieces; a text without marks of the format is content, unchanged; a call
    that is incomplete or not JSON is content, with its marks; reasoning that is cut off is
    reasoning; white space next to a mark may be left out, but no other text is lost; arguments have
    the values that the model wrote, in its order; no text raises an error.
    """

    @abstractmethod
    def feed(self, text: str) -> list[Delta]:
        """Add a piece of text, and return the deltas that no later text can change."""

    @abstractmethod
    def finish(self) -> list[Delta]:
        """Return the deltas of the text that was held back. Called once, at the end of the text."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModelChat:
    """The declarations about conversations in a model's files."""

    chat_template: str = ""
    """Jinja text; "" without a chat template."""
    response_template: Mapping[str, Any] | None = None
    """The response_template of tokenizer_config.json, which transformers reads; or None."""


@dataclasses.dataclass(frozen=True, slots=True)
class ParseRequest:
    """A request whose output is parsed."""

    chat: ModelChat = ModelChat()
    tools: Sequence[Mapping[str, Any]] = ()
    """The functions that may be called, each with "name" and optionally a schema "parameters"."""
    prompt_end: Callable[[int], str] = lambda _: ""
    """A function that returns the text of the prompt's last n tokens, with special tokens."""

    @property
    def names(self) -> frozenset[str]:
        """The names of the tools."""
        return frozenset(str(tool["name"]) for tool in self.tools)


@dataclasses.dataclass(frozen=True, slots=True)
class ExampleCall:
    """A call in an example; `arguments` is the JSON text that its deltas make."""

    name: str
    arguments: str = "{}"


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of an example's text: content, or else reasoning or calls with their marks."""

    text: str
    """The text as a model writes it, with marks and white space."""
    content: str | None = None
    """The content that is found in it; None: the text, unchanged."""
    reasoning: str | None = None
    """The reasoning that is found in it, if it is reasoning."""
    calls: Sequence[ExampleCall] = ()
    """The calls that are found in it, if it is calls."""


@dataclasses.dataclass(frozen=True, slots=True)
class Example:
    """A text of a format, as real models write it, and what a parser finds in it."""

    pieces: Sequence[Piece]
    request: ParseRequest = dataclasses.field(default_factory=ParseRequest)
    """The request whose answer it is. Without tools, it gets the tools that the example calls."""
    at_start: bool = False
    """Whether the format's marks count at the beginning of a completion only. If so, the example
    is content behind other text. If not, text may surround it.
    """

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(piece.text for piece in self.pieces)


@dataclasses.dataclass(frozen=True, slots=True)
class OutputFormat:
    """A format of tool calls, of reasoning, or of both; plugins register it as kind "format"."""

    make_parser: Callable[[ParseRequest], Parser]
    """Makes a parser for one completion."""
    serves: Callable[[ModelChat], bool]
    """Returns whether a model's chat template shows this format; `auto` calls it."""
    keeps_special_tokens: bool = False
    """Whether marks of the format are special tokens. If so, the text is decoded with them."""
    has_reasoning: bool = False
    """Whether a parser of tool calls also finds reasoning. If so, no reasoning parser is used."""
    examples: Sequence[Example] = ()
    """Texts of the format, with which `enginebay_testing.output_formats` checks its parser. A part
    without them serves, but fails the check.
    """
