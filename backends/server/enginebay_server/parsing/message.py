"""MessageParser: the reasoning parser and the tool parser of one completion."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from enginebay.contracts.output_format import (
    ContentDelta,
    Delta,
    Parser,
    ToolArgumentsDelta,
    ToolCallStart,
)
from enginebay_server.parsing.calls import loads

_CUT_INPUT = re.compile(r'\s*\{\s*"\w+"\s*:\s*("(?:[^"\\]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*)')
"""The text of an object with one text, as far as it was written."""


def custom_input(arguments: str) -> str:
    """Return the text for a custom tool in the arguments of its call: an object with one text. Of
    arguments that are cut off, the text so far; other arguments are the text themselves.
    """
    try:
        found = loads(arguments)
    except (ValueError, RecursionError):
        match = _CUT_INPUT.match(arguments)
        return "" if match is None else str(loads(f'{match[1]}"'))
    values = list(found.values()) if isinstance(found, dict) else []
    return values[0] if len(values) == 1 and isinstance(values[0], str) else arguments


class MessageParser(Parser):
    """Finds reasoning first, and then tool calls in the remaining text."""

    def __init__(
        self,
        reasoning: Parser | None,
        tools: Parser | None,
        *,
        several: bool = True,
        custom: Collection[str] = (),
    ) -> None:
        """Without `several`, calls after the first one are dropped. The arguments of a call of a
        tool in `custom` are the tool's text, and are returned when the call has ended.
        """
        self._reasoning = reasoning
        self._tools = tools
        self._several = several
        self._custom = custom
        self._held: tuple[int, list[str]] | None = None
        """The number of a call of a custom tool, and its arguments so far."""
        self.num_calls = 0
        """Number of calls that were returned."""

    def feed(self, text: str) -> list[Delta]:
        """Add a piece of text, and return the deltas that no later text can change."""
        if not text:
            return []
        if self._reasoning is None:
            return self._answer([ContentDelta(text)])
        return self._answer(self._reasoning.feed(text))

    def finish(self) -> list[Delta]:
        """Return the deltas of the text that was held back."""
        deltas = [] if self._reasoning is None else self._answer(self._reasoning.finish())
        if self._tools is None:
            return deltas
        return [*deltas, *self._counted(self._tools.finish()), *self._end_custom()]

    def _answer(self, deltas: Iterable[Delta]) -> list[Delta]:
        if self._tools is None:
            return list(deltas)
        found: list[Delta] = []
        for delta in deltas:
            found += self._tools.feed(delta.text) if isinstance(delta, ContentDelta) else [delta]
        return self._counted(found)

    def _counted(self, deltas: list[Delta]) -> list[Delta]:
        if not self._several:
            calls = (ToolCallStart, ToolArgumentsDelta)
            deltas = [one for one in deltas if not isinstance(one, calls) or one.index == 0]
        self.num_calls += sum(isinstance(delta, ToolCallStart) for delta in deltas)
        return self._with_inputs(deltas) if self._custom else deltas

    def _with_inputs(self, deltas: Iterable[Delta]) -> list[Delta]:
        """Replace the arguments of custom tools by their texts."""
        found: list[Delta] = []
        for delta in deltas:
            if self._held is not None and isinstance(delta, ToolArgumentsDelta):
                self._held[1].append(delta.text)
                continue
            found += [*self._end_custom(), delta]
            if isinstance(delta, ToolCallStart) and delta.name in self._custom:
                self._held = delta.index, []
        return found

    def _end_custom(self) -> list[Delta]:
        held, self._held = self._held, None
        if held is None:
            return []
        text = custom_input("".join(held[1]))
        return [ToolArgumentsDelta(held[0], text)] if text else []
