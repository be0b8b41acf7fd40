"""Text on the host: the contract of tokenizers, and stop texts in a stream of text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, Unpack

from enginebay.config_sections import SpecialTokens, TemplateLimits

Message = Mapping[str, Any]
"""One message of a chat: "role", "content", and other keys that the chat template reads."""


class ChatOptions(TypedDict, total=False):
    """Options for rendering a conversation.

    tools: descriptions of functions, for templates that read them. chat_template: Jinja text to use
    in place of the model's template. chat_template_kwargs: additional variables of the template.
    add_generation_prompt: whether to end with the prefix of an assistant's message; True by
    default. continue_final_message: True ends the text where the final message ends, and a string
    ends it where the field of this name in the final message ends; `add_generation_prompt` must
    then be False. max_prompt_tokens: as in `Tokenizer.encode`.
    """

    tools: Sequence[Mapping[str, Any]] | None
    chat_template: str | None
    add_generation_prompt: bool
    continue_final_message: bool | str
    chat_template_kwargs: Mapping[str, Any] | None
    max_prompt_tokens: int | None


class ChatPrompt(list[int]):
    """Token ids of a rendered conversation, after which an answer begins. Its text stands alone,
    where the output after any other prompt continues the prompt's text: a tokenizer of the kind of
    SentencePiece drops the first space of a text, and keeps that of a continuation.
    """


MAX_GENERATION_PROMPT = 16
"""Max tokens at the end of a ChatPrompt that begin an answer. The next turn's prompt may have other
tokens in their place, such as those of an answer without reasoning.
"""


class TextDecoder(ABC):
    """Decodes token ids to text while they arrive. The parts join to the text of all ids decoded at
    once. A copy (copy.copy) continues from the same tokens, independently.
    """

    @abstractmethod
    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens, and return the new text that later tokens cannot change; may be "". Bytes
        that are not a whole character yet are held back.
        """

    @abstractmethod
    def flush(self) -> str:
        """Return the held text at the end of the stream, with U+FFFD for incomplete characters. A
        later push begins a new text.
        """


class Tokenizer(ABC):
    """Converts texts and chats to token ids, and token ids to text. Any thread may call it. It
    is loaded with a checkpoint; the usual class is `enginebay.text.tokenizer.TextTokenizer`.

    Invariant: `decode` does not change spaces, so that the decoded parts of a sequence join to the
    decoded sequence.
    """

    inner: Any
    """The tokenizer of another library that does the work."""

    @property
    @abstractmethod
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template."""

    @abstractmethod
    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_prompt_tokens: int | None = None
    ) -> list[int]:
        """Return the token ids of a text. RequestError for a value that is not a str, for half of a
        UTF-16 surrogate pair, and for a text so long that it certainly has more than
        `max_prompt_tokens` tokens. Another text that is too long may be tokenised: count its ids.
        """

    @abstractmethod
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""

    @abstractmethod
    def decoder(
        self, *, skip_special_tokens: bool = True, after: Sequence[int] = ()
    ) -> TextDecoder:
        """Return a decoder for one stream of token ids. Its text continues that of the token ids
        `after`, without repeating it.
        """

    @abstractmethod
    def apply_chat_template(
        self, messages: Sequence[Message], **options: Unpack[ChatOptions]
    ) -> list[int]:
        """Render a conversation and return its token ids. The template writes all special tokens.
        They are a ChatPrompt unless the final message is continued.

        RequestError for messages that are empty, malformed or refused by the template, and for a
        template that exceeds a limit. UnsupportedError when there is no chat template.
        """

    @abstractmethod
    def limit_templates(self, limits: TemplateLimits) -> None:
        """Use these limits for all chats from now on."""

    @abstractmethod
    def read_special_tokens(self, how: SpecialTokens) -> None:
        """Convert special tokens in texts to tokens, or to the tokens of their letters, from now
        on. In a chat only the texts of the conversation count, not what the template writes.
        UnsupportedError for a tokenizer that cannot do so.
        """

    @abstractmethod
    def close(self) -> None:
        """End the worker process that renders chats. It starts again with the next chat."""


class StopChecker:
    """Finds stop texts in a stream of text, and holds back text that may be the beginning of a stop
    text.

    If several stop texts match, the one that ends first counts, and the longest of those that end
    at the same place, however the stream is divided. A stop text that ends in text pushed with
    `counts` False does not count; a stop text that only begins there does.
    """

    def __init__(self, stop: Sequence[str], *, include_stop_str_in_output: bool = False) -> None:
        self._stop = tuple(stop)
        self._include = include_stop_str_in_output
        self._longest = max(map(len, self._stop), default=0)
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
        """Add text, and return the held and new text that can be shown; "" after a stop text."""
        if self._met is not None:
            return ""
        if not self._stop:
            return text
        before, text = len(self._held), self._held + text
        # Stop texts that end in the held text were found by an earlier push, or did not count.
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
        """Return the text that is held back, at the end of the stream."""
        text, self._held = self._held, ""
        return text

    def _start_of_held(self, text: str) -> int:
        """Return where the longest end of `text` starts with which a stop text begins; len(text)
        when there is none.
        """
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if any(stop.startswith(text[start:]) for stop in self._stop):
                return start
        return len(text)
