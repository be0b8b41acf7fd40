"""MessageParser: the parsers of one completion, one behind the other."""

from __future__ import annotations

from collections.abc import Iterable

from enginebay_server.parsing.contract import (
    ContentDelta,
    Delta,
    Parser,
    ToolArgumentsDelta,
    ToolCallStart,
)


class MessageParser(Parser):
    """Reasoning is parsed first; what is no reasoning is looked through for tool calls."""

    def __init__(
        self, reasoning: Parser | None, tools: Parser | None, *, several: bool = True
    ) -> None:
        """Without `several` only the first call is given out; the others are left out."""
        self._reasoning = reasoning
        self._tools = tools
        self._several = several
        self.num_calls = 0
        """Calls that were given out."""

    def feed(self, text: str) -> list[Delta]:
        """What is certain with this piece."""
        if not text:
            return []
        if self._reasoning is None:
            return self._answer([ContentDelta(text)])
        return self._answer(self._reasoning.feed(text))

    def finish(self) -> list[Delta]:
        """What was held back."""
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
