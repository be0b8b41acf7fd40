"""Reasoning between <think> and </think>, before the answer."""

from __future__ import annotations

from enginebay.contracts.output_format import (
    ContentDelta,
    Delta,
    Example,
    ModelChat,
    OutputFormat,
    Parser,
    ParseRequest,
    Piece,
    ReasoningDelta,
)
from enginebay_server.parsing.marks import TextBeforeMarks

OPEN, CLOSE = "<think>", "</think>"


class ThinkParser(Parser):
    """The text is reasoning up to </think> if it begins with <think>, or if the prompt ends with
    <think>. Marks later in the text are content. Reasoning that is cut off stays reasoning.
    """

    def __init__(self, *, is_open: bool) -> None:
        """`is_open` says whether the prompt ends with <think>."""
        self._is_open = is_open
        self._start: str | None = ""
        """Text that may be the opening mark; None once that is decided."""
        self._reasoning: TextBeforeMarks | None = None
        self._follows_mark = False

    def feed(self, text: str) -> list[Delta]:
        """Add a piece of text, and return the deltas that no later text can change."""
        if self._start is not None:
            self._start += text
            begun = self._start.lstrip()
            if begun != OPEN and OPEN.startswith(begun):
                return []
            text, self._start = self._start, None
            if begun.startswith(OPEN):
                self._is_open, text = True, begun[len(OPEN) :]
            if self._is_open:
                self._reasoning = TextBeforeMarks((CLOSE,), strips=True)
        if self._reasoning is None:
            return self._answer(text)
        thought, mark = self._reasoning.feed(text)
        deltas: list[Delta] = [ReasoningDelta(thought)] if thought else []
        if mark is not None:
            self._reasoning, self._follows_mark = None, True
            deltas += self._answer(mark.rest)
        return deltas

    def finish(self) -> list[Delta]:
        """Return the deltas of the text that was held back."""
        if self._reasoning is not None:
            held = self._reasoning.finish()
            return [ReasoningDelta(held)] if held else []
        return [ContentDelta(self._start)] if self._start else []

    def _answer(self, text: str) -> list[Delta]:
        if self._follows_mark:
            text = text.lstrip()
            self._follows_mark = not text
        return [ContentDelta(text)] if text else []


def _make(request: ParseRequest) -> Parser:
    return ThinkParser(is_open=request.prompt_end(16).rstrip().endswith(OPEN))


def _serves(chat: ModelChat) -> bool:
    return CLOSE in chat.chat_template


_BEGUN = ParseRequest(prompt_end=lambda _: "<|im_start|>assistant\n<think>\n")
_EXAMPLES = (
    Example(
        (
            Piece("<think>\nThe capital, then.\n</think>\n\n", reasoning="The capital, then."),
            Piece("It is Paris."),
        ),
        at_start=True,
    ),
    Example(
        (
            Piece("<think>\n\n</think>\n\n", reasoning=""),
            Piece("Paris. The tag <think> begins no reasoning here, and </think> ends none."),
        ),
        at_start=True,
    ),
    Example(
        (
            Piece(
                "First:\n\n1. a < b\n2. so b > a\n</think>",
                reasoning="First:\n\n1. a < b\n2. so b > a",
            ),
            Piece("b is larger."),
        ),
        _BEGUN,
        at_start=True,
    ),
    Example(
        (Piece("<think>Is it Paris, or is it", reasoning="Is it Paris, or is it"),), at_start=True
    ),
    Example((Piece("It is Paris, I think."),)),
)

think = OutputFormat(_make, _serves, examples=_EXAMPLES)
