"""Chooses the formats by which the reasoning and the tool calls in a model's output are parsed."""

from __future__ import annotations

import dataclasses
from typing import Any

from enginebay.config_sections import AUTO
from enginebay.contracts.output_format import ModelChat, OutputFormat
from enginebay.errors import PluginError
from enginebay.plugins.registry import Registry

KIND = "format"
NO_PARSER = "none"
GENERIC = "json"
WANTED = "chosen by name"
DESCRIBED = "the chat template shows no format, so a system text describes tools and calls"


@dataclasses.dataclass(frozen=True, slots=True)
class ChosenFormat:
    """The format of tool calls or of reasoning. With `format` None, the output is not parsed."""

    name: str
    why: str
    format: OutputFormat | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class OutputFormats:
    """The formats of one model."""

    chat: ModelChat
    tool_choice: ChosenFormat
    reasoning_choice: ChosenFormat

    @property
    def tools(self) -> OutputFormat | None:
        """The format of tool calls."""
        return self.tool_choice.format

    @property
    def reasoning(self) -> OutputFormat | None:
        """The format of reasoning."""
        return self.reasoning_choice.format

    @property
    def lacks_tools(self) -> bool:
        """Whether "auto" found no format of tool calls for the model."""
        return self.tool_choice.format is None and self.tool_choice.why != WANTED

    @property
    def describes_tools(self) -> bool:
        """Whether a system text describes the tools, as the chat template does not."""
        return self.tool_choice.why == DESCRIBED


def choose_formats(
    registry: Registry,
    chat: ModelChat,
    *,
    tools: str = AUTO,
    reasoning: str = AUTO,
    describe: bool = False,
) -> OutputFormats:
    """Return the formats of tool calls and of reasoning with these names. "auto" chooses the format
    of the highest priority that serves the model, and "none" chooses no format. A format that reads
    both is one of tool calls. With `describe`, "auto" takes the format "json" for a model that no
    format serves.

    UnknownNameError for an unknown name, PluginError for a part that cannot be loaded.
    """
    readers = _readers(registry, calls=True)
    chosen = _choose(readers, tools, chat)
    if describe and tools == AUTO and chosen.format is None:
        chosen = dataclasses.replace(_choose(readers, GENERIC, chat), why=DESCRIBED)
    if chosen.format is not None and chosen.format.has_reasoning:
        why = f"the tool parser {chosen.name} finds reasoning too"
        return OutputFormats(chat, chosen, ChosenFormat(NO_PARSER, why))
    return OutputFormats(chat, chosen, _choose(_readers(registry, calls=False), reasoning, chat))


def _readers(registry: Registry, *, calls: bool) -> Registry:
    """Return the formats that read tool calls, or those that read reasoning alone."""
    return Registry(
        e
        for e in registry.entries
        if e.kind == "plugin"
        or (e.kind == KIND and ("tool_calls" in e.capability("reads", ())) == calls)
    )


def _choose(registry: Registry, name: str, chat: ModelChat) -> ChosenFormat:
    if name == NO_PARSER:
        return ChosenFormat(NO_PARSER, WANTED)
    if name != AUTO:
        found = _checked(registry.load(registry.find(KIND, name)), f"{KIND} {name!r}")
        return ChosenFormat(name, WANTED, found)
    for entry in registry.ready(KIND):
        try:
            found = _checked(registry.load(entry), f"{KIND} {entry.name!r}")
        except PluginError:
            continue  # a part that is named is refused with this error
        if found.serves(chat):
            return ChosenFormat(entry.name, "the chat template shows it", found)
    return ChosenFormat(NO_PARSER, "the chat template shows no format")


def _checked(target: Any, what: str) -> OutputFormat:
    if not isinstance(target, OutputFormat):
        raise PluginError(
            f"{what} is {target!r}",
            "an enginebay.contracts.output_format.OutputFormat",
            "Correct the plugin.",
        )
    return target


def model_chat(tokenizer: Any, chat_template: str | None = None) -> ModelChat:
    """Return the chat declarations of a tokenizer of transformers, or of another template."""
    own = getattr(tokenizer, "chat_template", None)
    if isinstance(own, dict):
        own = own.get("tool_use") or own.get("default")
    declared = getattr(tokenizer, "response_template", None)
    text = chat_template if chat_template is not None else own
    return ModelChat(
        text if isinstance(text, str) else "", declared if isinstance(declared, dict) else None
    )
