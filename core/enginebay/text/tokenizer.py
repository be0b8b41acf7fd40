"""TextTokenizer: implements the contract of enginebay with a tokenizer of transformers or a similar
one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol, Unpack

from enginebay.config_sections import SpecialTokens, TemplateLimits
from enginebay.contracts.text import ChatOptions, ChatPrompt, Message, Tokenizer
from enginebay.errors import PromptLengthError, RequestError, error_line
from enginebay.text.chat import Chat, WorkerChats, check_chat
from enginebay.text.detokenizer import IncrementalDetokenizer
from enginebay.text.token_lengths import max_chars_per_token, settings_of
from enginebay.text.worker.special_texts import NO_MARKS, Spans, SpecialTexts


class HuggingFaceTokenizer(Protocol):
    """The methods used of a fast tokenizer of transformers, or of a compatible one.

    `chat_template` is a Jinja text, or several by name, or None. Its variables are
    `special_tokens_map`, if the tokenizer has this attribute. A class that renders chats in another
    way has its own method apply_chat_template.
    """

    chat_template: Any

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Convert text to ids; `add_special_tokens` adds a begin-of-sequence token if the model
        uses one.
        """

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        clean_up_tokenization_spaces: bool,
    ) -> str:
        """Convert ids to text."""


def _is_panic(error: BaseException) -> bool:
    """Whether this is a panic of a library in Rust, which is no Exception. Expressions that split a
    text panic when they try too many ways.
    """
    return type(error).__module__ == "pyo3_runtime"


def _refusal(error: BaseException, done: str) -> RequestError:
    return RequestError(
        f"a text that cannot be {done}: {error_line(error)}",
        "text that the model's tokenizer can process",
        "Change the text, or the expression in the model's tokenizer.json.",
    )


class TextTokenizer(Tokenizer):
    """A fast tokenizer with clear errors, whose chats are rendered in a worker process."""

    def __init__(self, inner: HuggingFaceTokenizer) -> None:
        self.inner = inner
        self._chats = WorkerChats(TemplateLimits())
        self._special: SpecialTexts | None = None

    @property
    def has_chat_template(self) -> bool:
        return bool(self.inner.chat_template)

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        max_prompt_tokens: int | None = None,
        spans: Spans | None = None,
    ) -> list[int]:
        """Return the token ids of a text. RequestError for a value that is not a text or has a lone
        surrogate, and for a text that certainly has more than `max_prompt_tokens` tokens.

        `spans`: where special tokens are ordinary text, if the settings say so; None: everywhere.
        """
        if not isinstance(text, str):
            raise RequestError(f"a {type(text).__name__} to tokenise", "text", "Convert it to str.")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            given = f"the lone surrogate {text[error.start]!a} at character {error.start}"
            raise RequestError(
                given, "text that UTF-8 can write", "Decode the input with errors='replace'."
            ) from None
        if max_prompt_tokens is not None and len(text) > max_prompt_tokens:
            self._check_length(text, max_prompt_tokens)
        try:
            if self._special is not None:
                return self._special.encode(text, spans, add_special_tokens=add_special_tokens)
            return list(self.inner.encode(text, add_special_tokens=add_special_tokens))
        except BaseException as error:
            if not _is_panic(error):
                raise
            raise _refusal(error, "tokenised") from None

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids, with spaces unchanged."""
        try:
            return self.inner.decode(
                list(token_ids),
                skip_special_tokens=skip_special_tokens,
                clean_up_tokenization_spaces=False,
            )
        except BaseException as error:
            if not _is_panic(error):
                raise
            raise _refusal(error, "decoded") from None

    def decoder(
        self, *, skip_special_tokens: bool = True, after: Sequence[int] = ()
    ) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(self, skip_special_tokens=skip_special_tokens, after=after)

    def apply_chat_template(
        self, messages: Sequence[Message], **options: Unpack[ChatOptions]
    ) -> list[int]:
        fields: dict[str, Any] = {**options}
        max_prompt_tokens = fields.pop("max_prompt_tokens", None)
        chat, marks = Chat(messages, **fields), NO_MARKS
        if self._special is not None:
            check_chat(chat)
            chat, marks = self._special.marked(chat)
        text, spans = marks.removed(self._chats.render(self.inner, chat))
        marked: dict[str, Any] = {} if self._special is None else {"spans": spans}
        ids = self.encode(
            text, add_special_tokens=False, max_prompt_tokens=max_prompt_tokens, **marked
        )
        return ids if options.get("continue_final_message") else ChatPrompt(ids)

    def _check_length(self, text: str, max_prompt_tokens: int) -> None:
        """PromptLengthError for a text that certainly has more tokens. Tokenising it would take 200
        bytes of memory for each of its characters.
        """
        if self._chars_per_token is None:
            return
        at_least = -(-len(text) // self._chars_per_token)
        if at_least > max_prompt_tokens:
            raise PromptLengthError(
                f"a prompt of at least {at_least} tokens",
                f"at most {max_prompt_tokens}, which leaves room for one new token",
                "Shorten the prompt, or pass a larger --max-model-len.",
            )

    @cached_property
    def _chars_per_token(self) -> int | None:
        backend: Any = getattr(self.inner, "backend_tokenizer", None)
        return None if backend is None else max_chars_per_token(settings_of(backend))

    def limit_templates(self, limits: TemplateLimits) -> None:
        self._chats.close()
        self._chats = WorkerChats(limits)

    def read_special_tokens(self, how: SpecialTokens) -> None:
        self._special = SpecialTexts.of(self.inner) if how == "text" else None

    def close(self) -> None:
        self._chats.close()
