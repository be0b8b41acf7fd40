"""Text on the host: a tokenizer's face, token ids to text as they come, and stop texts across their borders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from enginebay.errors import RequestError, UnsupportedError, explain

Message = Mapping[str, Any]
"""One message of a chat: "role" and "content", and whatever else the chat template knows."""

UNFINISHED = "\ufffd"
"""What decoders give for bytes that are no character (yet)."""

MOST_HELD_TOKENS = 8
"""A character is at most 4 bytes, hence 4 tokens: more held tokens than this are no character to come."""


class HuggingFaceTokenizer(Protocol):
    """What is used of a fast tokenizer of transformers (or of one that looks like it)."""

    chat_template: Any

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Text to ids, with a begin-of-sequence token where the model wants one and it is asked for."""

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str:
        """Ids to text."""

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        chat_template: str | None,
        tokenize: bool,
        add_generation_prompt: bool,
    ) -> str:
        """Messages to the text that the model was trained on."""


class Tokenizer:
    """A tokenizer with clear errors, whose decoding of parts adds up to its decoding of the whole."""

    def __init__(self, inner: HuggingFaceTokenizer) -> None:
        self._inner = inner

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
            raise RequestError(explain(f"a {type(text).__name__} to tokenise", "text", "Convert it to str."))
        try:
            text.encode()
        except UnicodeEncodeError as error:
            given = f"the lone surrogate {text[error.start]!a} at character {error.start}"
            raise RequestError(
                explain(given, "text that UTF-8 can write", "Decode the input with errors='replace'.")
            ) from None
        return list(self._inner.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids, spaces as they are."""
        return self._inner.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Token ids of a conversation, by `chat_template` or the model's own; special tokens are the template's business.

        `tools` are descriptions of functions for the template, if it knows what to do with them.
        Raises RequestError for messages that are empty, malformed or refused by the template, UnsupportedError when the
        tokenizer has no chat template.
        """
        check_messages(messages)
        if chat_template is None and not self.has_chat_template:
            raise UnsupportedError(
                explain(
                    "messages for a tokenizer without a chat template",
                    "a text, or a model that has one",
                    "Give chat_template, or use generate with a prompt.",
                )
            )
        # Comes with every tokenizer that has a chat template.
        from jinja2 import TemplateError

        try:
            text = self._inner.apply_chat_template(
                messages,
                tools=tools,
                chat_template=chat_template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except TemplateError as error:
            raise RequestError(
                explain(
                    f"messages that the chat template refuses: {error}",
                    "what the model was trained on",
                    "Change the messages.",
                )
            ) from error
        return self.encode(text, add_special_tokens=False)


def check_messages(messages: Sequence[Message]) -> None:
    """Raise RequestError unless this is a non-empty sequence of mappings that have a role and a content."""
    todo = 'Give a list such as [{"role": "user", "content": "Hello"}].'
    allowed = "mappings with a text for role, and a content"
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(explain(f"messages of type {type(messages).__name__}", "a list of mappings", todo))
    if not messages:
        raise RequestError(explain("no messages", "at least one", todo))
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(explain(f"message {index} of type {type(message).__name__}", allowed, todo))
        if not isinstance(message.get("role"), str) or not message["role"]:
            raise RequestError(explain(f"message {index} with role {message.get('role')!r}", allowed, todo))
        if "content" not in message or not isinstance(message["content"], str | list | None):
            raise RequestError(
                explain(
                    f"message {index} ({message['role']}) without a text or list as content", allowed, todo
                )
            )


class IncrementalDetokenizer:
    """Turns token ids into text as they come; the parts joined are the text of all ids decoded at once.

    Bytes that are no whole character yet are held back. What a token adds depends on the tokens before it (leading spaces,
    bytes), so new tokens are decoded together with those of the part given last, and that part's text is taken off: the
    technique of two offsets known from text-generation-inference. A push decodes the tokens of the last part and its
    own, and a few held ones, never more.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._context: list[int] = []
        self._held: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is certain with these new tokens; "" when none is."""
        self._held += token_ids
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
        return self._give_up_waiting(text) if len(self._held) > MOST_HELD_TOKENS else ""

    def flush(self) -> str:
        """What is held back, bytes without a character as U+FFFD. For the end; another push begins a new text."""
        text = self._text_of(self._held) if self._held else ""
        self._context, self._held = [], []
        return text

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip) if token_ids else ""

    def _text_of(self, token_ids: list[int]) -> str:
        """What the tokens add after the context."""
        return self._decode(self._context + token_ids)[len(self._decode(self._context)) :]

    def _give(self, num_tokens: int, text: str) -> str:
        self._context, self._held = self._held[:num_tokens], self._held[num_tokens:]
        return text

    def _give_up_waiting(self, text: str) -> str:
        """Bounds what is held: tokens of no text are forgotten, bytes that are no character are given as they are.

        They are cut where both sides decode alone to what they decode to together, hence not within a character.
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
    """Finds stop texts in a stream of text, and never gives out text that a stop text still to be completed would cut.

    Of several stop texts the one that ends first counts, of those the longest: the same however the stream is cut. One that
    ends in text pushed with `counts` False does not count; one that only begins there does.
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
        """Where the longest end of `text` begins that a stop text begins with; its length when none does."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if any(stop.startswith(text[start:]) for stop in self._stop):
                return start
        return len(text)
