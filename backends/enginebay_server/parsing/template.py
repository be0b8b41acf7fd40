"""Output that the model's own response_template describes; transformers parses it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

from enginebay_server.parsing.calls import call_deltas, calls_of, new_id
from enginebay_server.parsing.contract import (
    ContentDelta,
    Delta,
    ModelChat,
    OutputFormat,
    Parser,
    ParseRequest,
    ReasoningDelta,
)

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
TOOL_FIELD = "tool_calls"
WHOLE_PROMPT = 1 << 30
"""A number of tokens that is larger than any prompt."""


class TemplateParser(Parser):
    """Converts the events of transformers' ResponseParser. White space around regions is dropped.

    A tool call that is not JSON is content, without its marks. If the library fails at a text, that
    text and all later text is content.
    """

    def __init__(self, request: ParseRequest) -> None:
        loaded = _load(_lenient(request.chat.response_template or {}))
        from transformers.utils.chat_parsing import ResponseParser

        for field in loaded.fields.values():
            field.optional = True  # text that is cut off may lack any region
        prompt = request.prompt_end(WHOLE_PROMPT)
        prefix = prompt if loaded.start_anchor_re.search(prompt) else ""
        self._parser: Any = ResponseParser(
            loaded, prefix=prefix, tools=[{"function": dict(tool)} for tool in request.tools]
        )
        self._held = self._body = ""
        """White space that may end a region; or the text of a structured region."""
        self._has_text = False
        """Whether a region has text besides white space."""
        self._num_calls = 0
        self._has_failed = False
        for event in self._parser.initial_events:
            self._take(event)  # the events of the prompt's text are not part of the answer

    def feed(self, text: str) -> list[Delta]:
        """Add a piece of text, and return the deltas that no later text can change."""
        if not self._has_failed:
            try:
                return self._deltas(self._parser.feed(text))
            except Exception:  # noqa: BLE001  # a declaration can make the library raise any error
                self._has_failed = True
        return [ContentDelta(text)] if text else []

    def finish(self) -> list[Delta]:
        """Return the deltas of the text that was held back."""
        if self._has_failed:
            return []
        try:
            return self._deltas(self._parser.finalize()[1])
        except Exception:  # noqa: BLE001  # as above
            return [ContentDelta(self._body)] if self._body else []

    def _deltas(self, events: list[dict[str, Any]]) -> list[Delta]:
        return [delta for event in events for delta in self._take(event)]

    def _take(self, event: Mapping[str, Any]) -> list[Delta]:
        kind, field = event["type"], event["field"]
        if kind == "region_open":
            self._held, self._body, self._has_text = "", "", False
            return []
        if kind == "region_close":
            body, self._held, self._body = self._body, "", ""
            if field != TOOL_FIELD:
                return [ContentDelta(body)] if body.strip() else []
            return self._calls(event["value"], body)
        if event.get("dirty") or field == TOOL_FIELD:
            self._body += event["text"]
            return []
        text = self._held + event["text"]
        text = text if self._has_text else text.lstrip()
        end = len(text.rstrip())
        text, self._held = text[:end], text[end:]
        self._has_text = self._has_text or bool(text)
        if not text:
            return []
        return [ReasoningDelta(text) if field in REASONING_FIELDS else ContentDelta(text)]

    def _calls(self, value: Any, body: str) -> list[Delta]:
        calls = calls_of(value)
        if not calls:
            return [ContentDelta(body)] if body.strip() else []
        deltas: list[Delta] = []
        for call in calls:
            deltas += call_deltas(call, self._num_calls, new_id)
            self._num_calls += 1
        return deltas


def _load(template: dict[str, Any]) -> Any:
    """Load the declaration by transformers.

    Importing transformers takes seconds, so this runs only for models with a declaration. Without
    torch it logs advice that does not apply here.
    """
    logging.getLogger("transformers").addFilter(_is_no_advice)
    from transformers.utils.chat_parsing.response_templates import load_response_template

    return load_response_template(template)


def _is_no_advice(record: logging.LogRecord) -> bool:
    return "PyTorch was not found" not in record.getMessage()


def _lenient(template: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template, changed to keep malformed JSON as text."""
    made = copy.deepcopy(dict(template))
    for field in (made.get("fields") or {}).values():
        if field.get("content") == "json":
            field["content_args"] = {**field.get("content_args", {}), "allow_non_json": True}
    return made


def _serves(chat: ModelChat) -> bool:
    """Return whether the model has a declaration that transformers accepts."""
    if chat.response_template is None:
        return False
    try:
        _load(_lenient(chat.response_template))
    except Exception:  # noqa: BLE001  # declarations come with checkpoints and may be anything
        return False
    return True


template = OutputFormat(TemplateParser, _serves, keeps_special_tokens=True, has_reasoning=True)
