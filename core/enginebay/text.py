"""Text on the host: a tokenizer's face, token ids to text as they come, and stop texts across their
borders.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from enginebay.config_sections import TemplateLimits
from enginebay.errors import RequestError, UnsupportedError

UNFINISHED = "\ufffd"
"""What decoders give for bytes that are no character (yet)."""

MAX_HELD_TOKENS = 8
"""A character is at most 4 bytes, hence 4 tokens: more held tokens than this are no character to
come.
"""


Message = Mapping[str, Any]
"""One message of a chat: "role" and "content", and whatever else the chat template knows."""


@dataclasses.dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, and how a request wants it rendered (see `Tokenizer.apply_chat_template`)."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    template: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool | str = False
    variables: Mapping[str, Any] | None = None


class ChatRenderer(ABC):
    """Renders chats for one tokenizer, within limits. Safe from several threads."""

    @abstractmethod
    def render(self, tokenizer: Any, chat: Chat) -> str:
        """The text of a chat, by its own template or that of a `HuggingFaceTokenizer`. RequestError
        for a chat that cannot be rendered, UnsupportedError when there is no template.
        """

    @abstractmethod
    def close(self) -> None:
        """End what renders. It starts again with the next chat."""


class NoChats(ChatRenderer):
    """Refuses all chats: for tokenizers of texts alone."""

    def __init__(self, limits: TemplateLimits) -> None:
        """`limits` are unused: nothing is rendered."""

    def render(self, tokenizer: Any, chat: Chat) -> str:
        """UnsupportedError."""
        raise UnsupportedError(
            "messages for a tokenizer that was made without a renderer of chats",
            "a text",
            "Make it with a renderer, such as enginebay_worker.chat.WorkerChats.",
        )

    def close(self) -> None:
        """Nothing to end."""


class HuggingFaceTokenizer(Protocol):
    """What is used of a fast tokenizer of transformers (or of one that looks like it).

    `chat_template` is a Jinja text, or several by name, or None. Its variables are
    `special_tokens_map`, where there is one. A class that renders chats by other means has a method
    apply_chat_template of its own.
    """

    chat_template: Any

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Text to ids, with a begin-of-sequence token where the model wants one and it is asked
        for.
        """

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        clean_up_tokenization_spaces: bool,
    ) -> str:
        """Ids to text."""


class Tokenizer:
    """A tokenizer with clear errors, whose decoding of parts adds up to its decoding of the whole."""

    def __init__(
        self,
        inner: HuggingFaceTokenizer,
        make_chats: Callable[[TemplateLimits], ChatRenderer] = NoChats,
    ) -> None:
        """`make_chats` makes what renders chats; without it chats are refused."""
        self._inner = inner
        self._make_chats = make_chats
        self._chats = make_chats(TemplateLimits())

    @property
    def inner(self) -> HuggingFaceTokenizer:
        """The tokenizer that does the work."""
        return self._inner

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` can work."""
        return bool(self._inner.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. RequestError for what is no text, or holds half a UTF-16 pair."""
        if not isinstance(text, str):
            raise RequestError(f"a {type(text).__name__} to tokenise", "text", "Convert it to str.")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            given = f"the lone surrogate {text[error.start]!a} at character {error.start}"
            raise RequestError(
                given, "text that UTF-8 can write", "Decode the input with errors='replace'."
            ) from None
        return list(self._inner.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids, spaces as they are."""
        return self._inner.decode(
            list(token_ids),
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool | str = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation, by `chat_template` or the model's own; special tokens are
        the template's business.

        `tools` are descriptions of functions for the template, if it knows what to do with them,
        `chat_template_kwargs` more variables of it. With `continue_final_message` the text ends
        where the final message does, or where its field of that name does; then
        `add_generation_prompt` must be False. Raises RequestError for messages that are empty,
        malformed or refused by the template, and for a template that exceeds a limit,
        UnsupportedError when the tokenizer has no chat template.
        """
        chat = Chat(
            messages,
            tools,
            chat_template,
            add_generation_prompt,
            continue_final_message,
            chat_template_kwargs,
        )
        return self.render(chat)

    def render(self, chat: Chat) -> list[int]:
        """apply_chat_template() of a Chat, with the same errors."""
        return self.encode(self._chats.render(self._inner, chat), add_special_tokens=False)

    def limit_templates(self, limits: TemplateLimits) -> None:
        """Render chats within these limits from now on."""
        self._chats.close()
        self._chats = self._make_chats(limits)

    def close(self) -> None:
        """End the process that renders chats. It starts again with the next chat."""
        self._chats.close()


class IncrementalDetokenizer:
    """Turns token ids into text as they come; the parts joined are the text of all ids decoded at
    once.

    Bytes that are no whole character yet are held back. What a token adds depends on the tokens
    before it (leading spaces, bytes), so new tokens are decoded together with those of the part
    given last, and that part's text is taken off: the technique of two offsets known from
    text-generation-inference. A push decodes the tokens of the last part and its own, and a few
    held ones, never more.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._context: list[int] = []
        self._held: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is certain with these new tokens; "" when none is."""
        self._held = [*self._held, *token_ids]  # no list is changed, so that a copy stays as it is
        if not self._held:
            return ""
        text = self._text_of(self._held)
        if text and not text.endswith(UNFINISHED):
            return self._give(len(self._held), text)
        if text:
            for cut in range(len(self._held) - 1, max(0, len(self._held) - 4), -1):
                part = self._text_of(self._held[:cut])
                if part and not part.endswith(UNFINISHED):
                    return self._give(cut, part)
        return self._give_up_waiting(text) if len(self._held) > MAX_HELD_TOKENS else ""

    def flush(self) -> str:
        """What is held back, bytes without a character as U+FFFD. For the end; another push begins
        a new text.
        """
        text = self._text_of(self._held) if self._held else ""
        self._context, self._held = [], []
        return text

    def _decode(self, token_ids: list[int]) -> str:
        return (
            self._tokenizer.decode(token_ids, skip_special_tokens=self._skip) if token_ids else ""
        )

    def _text_of(self, token_ids: list[int]) -> str:
        """What the tokens add after the context."""
        return self._decode(self._context + token_ids)[len(self._decode(self._context)) :]

    def _give(self, num_tokens: int, text: str) -> str:
        self._context, self._held = self._held[:num_tokens], self._held[num_tokens:]
        return text

    def _give_up_waiting(self, text: str) -> str:
        """Bounds what is held: tokens of no text are forgotten, bytes that are no character are
        given as they are.

        They are cut where both sides decode alone to what they decode to together, hence not within
        a character.
        """
        if not text:
            self._held = []
            return ""
        for cut in range(len(self._held) - 1, 0, -1):
            part = self._text_of(self._held[:cut])
            if part and part + self._decode(self._held[cut:]) == text:
                return self._give(cut, part)
        return self._give(len(self._held), text)


class StopChecker:
    """Finds stop texts in a stream of text, and never gives out text that a stop text still to be
    completed would cut.

    Of several stop texts the one that ends first counts, of those the longest: the same however the
    stream is cut. One that ends in text pushed with `counts` False does not count; one that only
    begins there does.
    """

    def __init__(self, stop: Sequence[str], *, include_stop_str_in_output: bool = False) -> None:
        self._stop = tuple(stop)
        self._include = include_stop_str_in_output
        self._longest = max((len(text) for text in self._stop), default=0)
        self._held = ""
        self._met: str | None = None

    @property
    def met(self) -> str | None:
        """The stop text that ended the stream, or None."""
        return self._met

    @property
    def stopped(self) -> bool:
        """Whether a stop text has ended the stream."""
        return self._met is not None

    def push(self, text: str, *, counts: bool = True) -> str:
        """What can be shown of the held text and this. Once a stop text was met, nothing any more."""
        if self.stopped:
            return ""
        before, text = len(self._held), self._held + text
        # What ends in the held text was looked for already, or did not count there.
        ends = [
            (start + len(stop), start, stop)
            for stop in (self._stop if counts else ())
            if (start := text.find(stop, max(0, before - len(stop) + 1))) >= 0
        ]
        if ends:
            end, start, self._met = min(ends)
            self._held = ""
            return text[: end if self._include else start]
        sure = self._start_of_held(text)
        self._held = text[sure:]
        return text[:sure]

    def flush(self) -> str:
        """The text held back, now that nothing follows."""
        text, self._held = self._held, ""
        return text

    def _start_of_held(self, text: str) -> int:
        """Where the longest end of `text` begins that a stop text begins with; its length when none
        does.
        """
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if any(stop.startswith(text[start:]) for stop in self._stop):
                return start
        return len(text)
