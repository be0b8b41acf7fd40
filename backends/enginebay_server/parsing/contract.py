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
    """A tool call begins. The calls of one completion are numbered from 0."""

    index: int
    id: str
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class ToolArgumentsDelta:
    """Further text of the arguments of a call that has begun: together they are a JSON object."""

    index: int
    text: str


Delta: TypeAlias = ContentDelta | ReasoningDelta | ToolCallStart | ToolArgumentsDelta


class Parser(ABC):
    """Parses the text of one completion, which comes in pieces of any size.

    Invariants (held by `enginebay_testing.output_formats`): joined, the deltas do not depend on how
    the text is cut into pieces; a text without marks of the format is content as it stands; a call
    that is not complete, or is no JSON, is content with its marks; no text raises an error.
    """

    @abstractmethod
    def feed(self, text: str) -> list[Delta]:
        """What is certain with this piece."""

    @abstractmethod
    def finish(self) -> list[Delta]:
        """What was held back, now that the text has ended. Nothing is fed afterwards."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModelChat:
    """What a model's files declare about the form of its conversations."""

    chat_template: str = ""
    """Jinja text; "" without a chat template."""
    response_template: Mapping[str, Any] | None = None
    """What tokenizer_config.json declares about the form of the output, for transformers."""


@dataclasses.dataclass(frozen=True, slots=True)
class ParseRequest:
    """A request whose output is parsed."""

    chat: ModelChat
    tools: Sequence[Mapping[str, Any]] = ()
    """The functions that may be called, each with "name" and perhaps "parameters", a schema."""
    prompt_end: Callable[[int], str] = lambda _: ""
    """The text of the prompt's last tokens, as many as given, with special tokens."""

    @property
    def names(self) -> frozenset[str]:
        """The names of the tools."""
        return frozenset(str(tool["name"]) for tool in self.tools)


@dataclasses.dataclass(frozen=True, slots=True)
class OutputFormat:
    """What a plugin registers as kind "tool_parser" or "reasoning_parser"."""

    make_parser: Callable[[ParseRequest], Parser]
    """Makes the parser of one completion."""
    serves: Callable[[ModelChat], bool]
    """Whether a model writes in this format, as far as its chat template shows; for `auto`."""
    keeps_special_tokens: bool = False
    """Whether marks of the format are special tokens, so that the text is decoded with them."""
    has_reasoning: bool = False
    """Of a format of tool calls: whether its parser finds reasoning too. No reasoning parser is
    used beside it.
    """
