"""Renders chat templates in the worker process, as transformers renders them; the Jinja texts come
from untrusted authors.

The sandbox, its filters, functions and tags are those that transformers gives to chat templates,
without importing transformers, which takes a second. `tests/unit/test_chat_templates.py` compares
the two.
"""

from __future__ import annotations

import datetime as dt
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_COMPILED = 16
"""Max number of compiled templates that are kept."""

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Fields of a message that hold its reasoning. Each template knows one of these names, so each
message gets all of them.
"""

MARK = "\ue000end of the final message\ue001 "
"""Appended to the text of a message that is to be continued, to find its end in the rendered text.

The last space is there for templates that strip the texts of messages.
"""


class Renderer:
    """Renders chats. A request holds the template and its variables; the answer holds the text, or
    a `reason` why there is none.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._max_chars: int = settings["max_output_chars"]

    def __call__(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return {"text"}, {"reason"} or {"exceeded"}."""
        field = "content" if request["continued"] is True else request["continued"] or None
        try:
            messages = [_completed(message) for message in request["messages"]]
            if field:
                messages[-1] = _marked(messages[-1], field)
            parts, chars = [], 0
            for part in _compiled(request["template"]).generate(
                **request["variables"], messages=messages, **request["given"]
            ):
                parts.append(part)
                chars += len(part)
                if chars > self._max_chars + len(MARK):
                    return {"exceeded": "output"}
            text = "".join(parts)
            text = _cut(text) if field else text
            return {"exceeded": "output"} if len(text) > self._max_chars else {"text": text}
        except jinja2.TemplateSyntaxError as error:
            return {"reason": f"line {error.lineno} of the template: {error.message}"}
        except jinja2.UndefinedError as error:
            return {"reason": f"the template uses an undefined name: {error.message}"}
        except jinja2.TemplateError as error:
            return {"reason": str(error.message)}
        except (MemoryError, RecursionError):
            raise
        except Exception as error:  # noqa: BLE001  # a template is a program that may raise anything
            return {"reason": f"the template raised {type(error).__name__}: {error}"}


class GenerationTag(Extension):
    """{% generation %} marks text that a model wrote, for training. Here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 requires this attribute

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the statements between the tags, in a scope of their own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class PlainNamespace(Namespace):
    """A namespace whose names cannot reach attributes of Python objects."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` may be a name in the template
        for name in dict(*args[1:], **kwargs):
            _refuse_private(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot have the attribute {name!r}")


@functools.lru_cache(MAX_COMPILED)
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)


@functools.cache
def _environment() -> jinja2.Environment:
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    made.filters["tojson"] = _to_json
    made.globals.update(
        raise_exception=_raise,
        strftime_now=_now,
        namespace=PlainNamespace,
        dict=_dict,
    )
    return made


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002  # templates may pass it by position
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """Return plain JSON; Jinja's own filter escapes it for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """dict() as a function, because templates must not reach the type."""
    return dict(*args, **kwargs)


def _now(form: str) -> str:
    return dt.datetime.now().strftime(form)  # noqa: DTZ005  # local time


def _completed(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without fields that are None, and with its reasoning under every
    known name.
    """
    completed = {name: value for name, value in message.items() if value is not None}
    reasoning = next((completed[name] for name in REASONING if name in completed), None)
    if reasoning is None:
        return completed
    return {"thinking": reasoning, **completed, "reasoning_content": reasoning}


def _marked(message: dict[str, Any], field: str) -> dict[str, Any]:
    """Return a message whose text in `field` ends with MARK. TemplateError when it has no such
    text.
    """
    value = message.get(field)
    if isinstance(value, str):
        same = [
            field,
            *(name for name in REASONING if field in REASONING and message.get(name) == value),
        ]
        return message | dict.fromkeys(same, value + MARK)
    parts = value if isinstance(value, Sequence) else []
    for index in reversed(range(len(parts))):
        part = parts[index]
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            changed = part | {"text": part["text"] + MARK}
            return message | {field: [*parts[:index], changed, *parts[index + 1 :]]}
    raise jinja2.TemplateError(f"the final message has no text in {field} to continue")


def _cut(text: str) -> str:
    """Return the text before MARK, stripped at its end if the template strips the texts of
    messages.
    """
    at = text.rfind(MARK.strip())
    if at < 0:
        raise jinja2.TemplateError(
            "the template changes the text of the final message, so it cannot be continued"
        )
    return text[:at] if text.startswith(MARK, at) else text[:at].rstrip()
