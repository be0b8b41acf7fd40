"""MessageParser: the reasoning parser and the tool parser of one completion."""

from __future__ import annotations

from collections.abc import Iterable

from enginebay.contracts.output_format import (
    ContentDelta,
    Delta,
    Parser,
    ToolArgumentsDelta,
    ToolCallStart,
)


class MessageParser(Parser):
    """Finds reasoning first, and then tool calls in the remaining text."""

    def __init__(
        self, reasoning: Parser | None, tools: Parser | None, *, several: bool = True
    ) -> None:
        """Without `several`, calls after the first one are dropped."""
        self._reasoning = reasoning
        self._tools = tools
        self._several = several
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
        return deltas if self._tools is None else deltas + self._counted(self._tools.finish())

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
        return deltas
