"""Output that the model's own response_template describes; transformers parses it."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Mapping
from typing import Any

from enginebay.contracts.output_format import (
    ContentDelta,
    Delta,
    ModelChat,
    OutputFormat,
    Parser,
    ParseRequest,
    ReasoningDelta,
)
from enginebay_server.parsing.calls import Call, CallWriter, calls_of
from enginebay_server.parsing.template_examples import EXAMPLES

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
TOOL_FIELD = "tool_calls"
WHOLE_PROMPT = 1 << 30
"""A number of tokens that is larger than any prompt."""


class TemplateParser(Parser):
    """Converts the events of transformers' ResponseParser, which divides the text into the regions
    of the declaration. White space around marks is dropped.

    The declared content of a tool call is parsed when its region ends, so that text which is no
    call, or which the library refuses, is content with its marks.
    """

    def __init__(self, request: ParseRequest) -> None:
        declaration = json.dumps(request.chat.response_template or {})
        self._regions, self._whole = _load(declaration, as_text=True), _load(declaration)
        self._tools = [{"function": dict(tool)} for tool in request.tools]
        prompt = request.prompt_end(WHOLE_PROMPT)
        prefix = prompt if self._regions.start_anchor_re.search(prompt) else ""
        self._parser = _response_parser(self._regions, prefix)
        self._raw = self._regions.truncate_past_last_anchor(prefix) if prefix else ""
        """Text of which no event was taken, marks included."""
        self._mark = self._body = ""
        """The mark and the text of a tool call that has begun."""
        self._held = ""
        """White space that may precede a mark."""
        self._follows_mark = False
        """Whether white space is dropped here."""
        self._has_ended = self._has_regions = False
        self._writer = CallWriter()
        for event in self._parser.initial_events:
            self._take(event)  # the events of the prompt's text are not part of the answer
        self._held = ""

    def feed(self, text: str) -> list[Delta]:
        """Add a piece of text, and return the deltas that no later text can change."""
        self._raw += text
        return [delta for event in self._parser.feed(text) for delta in self._take(event)]

    def finish(self) -> list[Delta]:
        """Return the deltas of the text that was held back."""
        self._has_ended = True
        events = self._parser.finalize()[1]
        deltas = [delta for event in events for delta in self._take(event)]
        rest = self._held if self._has_regions else self._raw
        return [*deltas, ContentDelta(rest)] if rest else deltas

    def _take(self, event: Mapping[str, Any]) -> list[Delta]:
        field = self._regions.fields[event["field"]]
        self._has_regions = True
        if event["type"] == "region_open":
            self._open(field)
            return []
        if event["type"] == "region_close":
            return self._close(field)
        self._raw = self._raw[len(event["text"]) :]
        if field.name == TOOL_FIELD:
            self._body += event["text"]
            return []
        return self._text(event["text"], is_reasoning=field.name in REASONING_FIELDS)

    def _open(self, field: Any) -> None:
        mark = self._mark_of(field.open_re)
        if mark is None:
            return
        if field.name == TOOL_FIELD:
            self._mark, self._body = self._held + mark, ""
        else:
            self._follows_mark = True
        self._held = ""

    def _close(self, field: Any) -> list[Delta]:
        mark = self._mark_of(field.close_re, is_next=True)
        if field.name == TOOL_FIELD:
            text = self._mark + self._body + (mark or "")
            is_cut = self._has_ended and mark is None and field.close_re is not None
            deltas = [
                delta
                for call in self._calls(text, is_cut=is_cut)
                for delta in self._writer.deltas(call)
            ]
            self._mark = self._body = ""
            if not deltas:
                return self._text(text, is_reasoning=False)
            self._follows_mark = True
            return deltas
        held = self._held
        if mark is not None:
            self._held, self._follows_mark = "", True
        elif self._has_ended and field.name in REASONING_FIELDS:
            self._held = ""
            return [ReasoningDelta(held)] if held else []
        return []

    def _mark_of(self, pattern: Any, *, is_next: bool = False) -> str | None:
        """Remove the next mark from the text, and return it. The text before it is dropped, as the
        declaration has no region for it.
        """
        match = None if pattern is None else pattern.search(self._raw)
        if match is None or (is_next and match.start()):
            return None
        self._raw = self._raw[match.end() :]
        return str(match[0])

    def _text(self, text: str, *, is_reasoning: bool) -> list[Delta]:
        text = self._held + text
        text = text.lstrip() if self._follows_mark else text
        end = len(text.rstrip())
        text, self._held = text[:end], text[end:]
        if not text:
            return []
        self._follows_mark = False
        return [ReasoningDelta(text) if is_reasoning else ContentDelta(text)]

    def _calls(self, text: str, *, is_cut: bool) -> list[Call]:
        """Return the calls in the text of a region. JSON needs no closing mark to be complete."""
        if is_cut and self._whole.fields[TOOL_FIELD].content != "json":
            return []
        try:
            parser = _response_parser(self._whole, "", self._tools)
            events = [*parser.feed(text), *parser.finalize()[1]]
            values = [
                event["value"]
                for event in events
                if (event["type"], event["field"]) == ("region_close", TOOL_FIELD)
            ]
        except Exception:  # noqa: BLE001  # a declaration can make the library raise any error
            return []
        return calls_of(values[0]) if values else []


def _response_parser(loaded: Any, prefix: str, tools: Any = None) -> Any:
    from transformers.utils.chat_parsing import ResponseParser

    return ResponseParser(loaded, prefix=prefix, tools=tools)


@functools.lru_cache(maxsize=16)
def _load(declaration: str, *, as_text: bool = False) -> Any:
    """Load the declaration, which is JSON, by transformers. With `as_text`, the content of every
    region is its text.

    Importing transformers takes seconds, so this runs only for models with a declaration. Without
    torch it logs advice that does not apply here.
    """
    logging.getLogger("transformers").addFilter(_is_no_advice)
    from transformers.utils.chat_parsing.response_templates import load_response_template

    loaded = load_response_template(json.loads(declaration))
    for field in loaded.fields.values():
        field.optional = True  # text that is cut off may lack any region
        if as_text:
            field.content, field.content_args = "text", {}
            field.transform, field.transform_each, field.join = None, False, None
    return loaded


def _is_no_advice(record: logging.LogRecord) -> bool:
    return "PyTorch was not found" not in record.getMessage()


def _serves(chat: ModelChat) -> bool:
    """Return whether the model has a declaration that transformers accepts."""
    if chat.response_template is None:
        return False
    try:
        _load(json.dumps(chat.response_template))
    except Exception:  # noqa: BLE001  # declarations come with checkpoints and may be anything
        return False
    return True


template = OutputFormat(
    TemplateParser, _serves, keeps_special_tokens=True, has_reasoning=True, examples=EXAMPLES
)
