"""Which formats of reasoning and tool calls a model's output is parsed by."""

from __future__ import annotations

import dataclasses
from typing import Any

from enginebay.config_sections import AUTO
from enginebay.errors import PluginError
from enginebay.registry import Registry
from enginebay_server.parsing.contract import ModelChat, OutputFormat

TOOLS, REASONING = "tool_parser", "reasoning_parser"
NO_PARSER = "none"


@dataclasses.dataclass(frozen=True, slots=True)
class OutputFormats:
    """The formats of one model. None: its output is not looked through."""

    chat: ModelChat
    tools: OutputFormat | None
    reasoning: OutputFormat | None

    @property
    def keep_special_tokens(self) -> bool:
        """Whether the output is decoded with special tokens."""
        formats = (self.tools, self.reasoning)
        return any(one is not None and one.keeps_special_tokens for one in formats)


def choose_formats(
    registry: Registry, chat: ModelChat, *, tools: str = AUTO, reasoning: str = AUTO
) -> OutputFormats:
    """The formats of these names. "auto": the first, by priority, that serves the model; "none":
    none.

    UnknownNameError for an unknown name, PluginError for a part that cannot be loaded.
    """
    chosen = _choose(registry, TOOLS, tools, chat)
    if chosen is not None and chosen.has_reasoning:
        return OutputFormats(chat, chosen, None)
    return OutputFormats(chat, chosen, _choose(registry, REASONING, reasoning, chat))


def _choose(registry: Registry, kind: str, name: str, chat: ModelChat) -> OutputFormat | None:
    if name == NO_PARSER:
        return None
    if name != AUTO:
        return _checked(registry.load(registry.find(kind, name)), f"{kind} {name!r}")
    for entry in registry.ready(kind):
        try:
            found = _checked(registry.load(entry), f"{kind} {entry.name!r}")
        except PluginError:
            continue  # a part that is named is refused with this error
        if found.serves(chat):
            return found
    return None


def _checked(target: Any, what: str) -> OutputFormat:
    if not isinstance(target, OutputFormat):
        raise PluginError(
            f"{what} is {target!r}",
            "an enginebay_server.parsing.contract.OutputFormat",
            "Correct the plugin.",
        )
    return target


def model_chat(tokenizer: Any, chat_template: str | None = None) -> ModelChat:
    """What the tokenizer of transformers, or a template in place of its own, says of chats."""
    own = getattr(tokenizer, "chat_template", None)
    if isinstance(own, dict):
        own = own.get("tool_use") or own.get("default")
    declared = getattr(tokenizer, "response_template", None)
    text = chat_template if chat_template is not None else own
    return ModelChat(
        text if isinstance(text, str) else "", declared if isinstance(declared, dict) else None
    )
