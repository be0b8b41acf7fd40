"""Text on the host: the contract of tokenizers, token ids to text as they come, and stop texts
across their borders.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, Unpack

from enginebay.config_sections import TemplateLimits

UNFINISHED = "\ufffd"
"""What decoders give for bytes that are no character (yet)."""

MAX_HELD_TOKENS = 8
"""A character is at most 4 bytes, hence 4 tokens: more held tokens than this are no character to
come.
"""


Message = Mapping[str, Any]
"""One message of a chat: "role" and "content", and whatever else the chat template knows."""


class ChatOptions(TypedDict, total=False):
    """How a request wants its conversation rendered.

    `tools` are descriptions of functions for the template, if it knows what to do with them,
    `chat_template` is Jinja text in place of the model's, and `chat_template_kwargs` are further
    variables of it. With `continue_final_message` the text ends where the final message does, or
    where its field of that name does; then `add_generation_prompt`, True by default, must be False.
    """

    tools: Sequence[Mapping[str, Any]] | None
    chat_template: str | None
    add_generation_prompt: bool
    continue_final_message: bool | str
    chat_template_kwargs: Mapping[str, Any] | None


class Tokenizer(ABC):
    """Texts and chats to token ids and back. Safe from several threads. What a checkpoint loads;
    the usual one is `enginebay_worker.tokenizer.TextTokenizer`.

    Invariant: `decode` keeps spaces as they are, so that decoding parts adds up to decoding the
    whole.
    """

    inner: Any
    """The tokenizer of another library that does the work."""

    @property
    @abstractmethod
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` can work."""

    @abstractmethod
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. RequestError for what is no text, or holds half a UTF-16 pair."""

    @abstractmethod
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids."""

    @abstractmethod
    def apply_chat_template(
        self, messages: Sequence[Message], **options: Unpack[ChatOptions]
    ) -> list[int]:
        """Token ids of a conversation; special tokens are the template's business.

        RequestError for messages that are empty, malformed or refused by the template, and for a
        template that exceeds a limit, UnsupportedError when there is no chat template.
        """

    @abstractmethod
    def limit_templates(self, limits: TemplateLimits) -> None:
        """Render chats within these limits from now on."""

    @abstractmethod
    def close(self) -> None:
        """End what renders chats. It starts again with the next chat."""


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
        """What can be shown of the held text and this. Once a stop text was met, nothing any
        more.
        """
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
