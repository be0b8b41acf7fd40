"""Converts chats to text: renders the chat template of a model or a request in a worker process
with limits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from enginebay.config_sections import TemplateLimits
from enginebay.contracts.text import Message
from enginebay.errors import (
    EnginebayError,
    RequestError,
    StoppedError,
    UnsupportedError,
    error_line,
)
from enginebay.text.worker.process import (
    KilledError,
    LimitedWorker,
    LimitError,
    WorkerError,
    WorkerLimits,
)

RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})
"""Variables of a template that are set by other parameters."""

BASE_RENDERER = "transformers.tokenization_utils_base"
"""Module of the method with which all tokenizers of transformers render Jinja templates."""


@dataclasses.dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, and how a request wants it rendered (see
    `enginebay.contracts.text.ChatOptions`).
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    chat_template: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool | str = False
    chat_template_kwargs: Mapping[str, Any] | None = None


class WorkerChats:
    """Renders the chats of one tokenizer in a worker process, which starts with the first chat.
    Thread-safe.
    """

    def __init__(self, limits: TemplateLimits) -> None:
        self._limits = limits
        self._worker = LimitedWorker(
            "enginebay.text.worker.templates:Renderer",
            {"max_output_chars": limits.max_output_chars},
            WorkerLimits(limits.time_s, limits.memory_bytes, limits.stack_bytes),
        )

    def render(self, tokenizer: Any, chat: Chat) -> str:
        """Return the text of a chat, by its own template or by that of a tokenizer of transformers
        or a compatible one.

        A tokenizer whose class renders chats itself does so in this process, unless the request has
        a template. RequestError for a malformed chat, a chat that the template refuses, and an
        exceeded limit; UnsupportedError when there is no template.
        """
        check_chat(chat)
        if chat.chat_template is None and not tokenizer.chat_template:
            raise _no_template()
        if chat.chat_template is None and _renders_itself(tokenizer):
            return _rendered_by(tokenizer, chat)
        request = {
            "template": _template(tokenizer.chat_template, chat),
            "messages": chat.messages,
            "variables": {
                **getattr(tokenizer, "special_tokens_map", {}),
                **(chat.chat_template_kwargs or {}),
            },
            "given": {"tools": chat.tools, "add_generation_prompt": chat.add_generation_prompt},
            "continued": chat.continue_final_message,
        }
        return self._text(request)

    def close(self) -> None:
        """End the worker process; the next chat starts another one."""
        self._worker.close()

    def _text(self, request: Any) -> str:
        try:
            answer = self._worker.ask(request, default=_placeholder)
        except RecursionError:
            raise _refused("they are nested too deeply") from None
        except (TypeError, ValueError) as error:  # not a JSON value
            raise _refused(str(error)) from None
        except LimitError as error:
            raise self._exceeded(error.limit) from None
        except KilledError as error:
            raise StoppedError(
                f"the worker process of chat templates cannot work: {error}"
            ) from None
        except WorkerError as error:
            raise _refused(str(error)) from None
        if "exceeded" in answer:
            raise self._exceeded(answer["exceeded"])
        if "reason" in answer:
            raise _refused(answer["reason"])
        text: str = answer["text"]
        return text

    def _exceeded(self, limit: str) -> RequestError:
        limits = self._limits
        allowed = {
            "time": f"{limits.time_s:g} seconds (template_limits.time_s)",
            "memory": f"{limits.memory_bytes} bytes of memory (template_limits.memory_bytes)",
            "stack": f"{limits.stack_bytes} bytes of stack (template_limits.stack_bytes)",
            "depth": "values and calls within Python's recursion limit",
            "output": f"{limits.max_output_chars} characters (template_limits.max_output_chars)",
        }
        return RequestError(
            f"a chat whose template exceeds the limit of {limit}",
            allowed[limit],
            "Fix the template, shorten the messages, or raise the limit.",
        )


def check_chat(chat: Chat) -> None:
    """Raise RequestError for messages, tools or variables that no template can take."""
    check_messages(chat.messages)
    _check_tools(chat.tools)
    if not isinstance(chat.chat_template, str | None):
        given = f"chat_template of type {type(chat.chat_template).__name__}"
        raise RequestError(given, "a Jinja text", "Leave it out to use the model's template.")
    if chat.chat_template_kwargs is not None and not isinstance(chat.chat_template_kwargs, Mapping):
        given = f"chat_template_kwargs of type {type(chat.chat_template_kwargs).__name__}"
        raise RequestError(given, "a mapping of names to values", "Pass a dict.")
    taken = sorted(RESERVED & (chat.chat_template_kwargs or {}).keys())
    if taken:
        given = f"{', '.join(taken)} in chat_template_kwargs"
        raise RequestError(
            given, "other variables of the template", "Pass the parameter with this name instead."
        )
    if chat.continue_final_message and chat.add_generation_prompt:
        raise RequestError(
            "continue_final_message with add_generation_prompt",
            "one of them",
            "Pass add_generation_prompt=False to continue the final message.",
        )


def _check_tools(tools: Any) -> None:
    if tools is None:
        return
    listed = isinstance(tools, Sequence) and not isinstance(tools, str)
    strange = next((t for t in tools if not isinstance(t, Mapping)), None) if listed else tools
    if not listed or strange is not None:
        raise RequestError(
            f"tools with a {type(strange).__name__}",
            "a list of mappings, each a JSON description of a function",
            'Pass a list such as [{"type": "function", "function": {"name": "f", '
            '"parameters": {}}}].',
        )


_CALLS = ("tool_calls", "function_call")


def check_messages(messages: Sequence[Message]) -> None:
    """Raise RequestError unless `messages` is a non-empty sequence of mappings with a role and a
    content. An assistant's message with calls of tools needs no content.
    """
    todo = 'Pass a list such as [{"role": "user", "content": "Hello"}].'
    allowed = "mappings with a role (a string) and a content (a string or a list)"
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(
            f"messages of type {type(messages).__name__}", "a list of mappings", todo
        )
    if not messages:
        raise RequestError("no messages", "at least one", todo)
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"message {index} of type {type(message).__name__}", allowed, todo)
        if not isinstance(message.get("role"), str) or not message["role"]:
            raise RequestError(f"message {index} with role {message.get('role')!r}", allowed, todo)
        calls = message["role"] == "assistant" and any(message.get(one) for one in _CALLS)
        if not isinstance(message.get("content", None if calls else 0), str | list | None):
            raise RequestError(
                f"message {index} ({message['role']}) without a text or list as content",
                allowed,
                todo,
            )


def _renders_itself(tokenizer: Any) -> bool:
    method = getattr(type(tokenizer), "apply_chat_template", None)
    return method is not None and getattr(method, "__module__", None) != BASE_RENDERER


def _rendered_by(tokenizer: Any, chat: Chat) -> str:
    """Return the text of a chat from a tokenizer that renders chats itself."""
    more = (
        {"continue_final_message": chat.continue_final_message}
        if chat.continue_final_message
        else {}
    )
    try:
        text = tokenizer.apply_chat_template(
            chat.messages,
            tools=chat.tools,
            chat_template=None,
            tokenize=False,
            add_generation_prompt=chat.add_generation_prompt,
            **more,
            **(chat.chat_template_kwargs or {}),
        )
    except EnginebayError:
        raise
    except Exception as error:  # the tokenizer's renderer may raise anything
        raise _refused(error_line(error)) from error
    if not isinstance(text, str):
        raise _refused(f"the tokenizer returned a {type(text).__name__}, expected a string")
    return text


def _template(own: Any, chat: Chat) -> str:
    """Return the Jinja template: the request's, or the model's template that the request names or
    that fits. RequestError when there is no such template.
    """
    named = own if isinstance(own, Mapping) else {}
    template = chat.chat_template if chat.chat_template is not None else own
    if chat.chat_template in named:
        template = named[chat.chat_template]
    elif chat.chat_template is None and named:
        template = (
            named.get("tool_use") if chat.tools and "tool_use" in named else named.get("default")
        )
    if isinstance(template, str):
        return template
    given = f"a chat template of type {type(template).__name__}"
    if named:
        given = f"a model with chat templates {', '.join(map(str, named))}"
    raise RequestError(
        given, "a Jinja text, or several with one named default", "Pass chat_template."
    )


def _placeholder(value: Any) -> Any:
    """Convert other mappings and sequences, and numpy's numbers, to JSON values. A template only
    sees the type of any other value.
    """
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    if hasattr(value, "dtype") and getattr(value, "ndim", None) == 0:
        return value.item()
    return f"<{type(value).__name__}>"


def _no_template() -> UnsupportedError:
    return UnsupportedError(
        "messages for a tokenizer without a chat template",
        "a prompt, or a model with a chat template",
        "Pass chat_template, or call generate with a prompt.",
    )


def _refused(reason: str) -> RequestError:
    line = " ".join(reason.split())
    return RequestError(
        f"messages that the chat template refuses: {line[:500]}",
        "messages that the template supports",
        "Change the messages.",
    )
