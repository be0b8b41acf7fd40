"""Prompts (texts and conversations), and their results: PromptOutput and streams of text."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from enginebay.contracts.text import Message, Tokenizer
from enginebay.errors import RequestError, UnsupportedError
from enginebay.serving.assemble import CompletionReader
from enginebay.serving.running import TokenEvent
from enginebay.types import FinishReason, Request, SamplingParams
from enginebay_shared.params import with_length
from enginebay_vinference.errors import PromptTypeError
from enginebay_vinference.state import SampleState

TextOrMessages = str | Sequence[Message]


class PromptOutput(BaseModel):
    """The result of a prompt: text, number of new tokens, decode tokens per second, and finish
    reason; or the error.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    text: str | None = None
    generated_tokens: int | None = None
    tokens_per_second: float | None = None
    error: str | None = None
    finish_reason: str | None = None


def is_conversation(prompt: Any) -> bool:
    """Return whether `prompt` is a non-empty list of messages."""
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str | bytes)
        and bool(prompt)
        and all(isinstance(message, Mapping) for message in prompt)
    )


def as_texts(prompts: Any) -> list[str]:
    """Return a list of texts. TypeError for anything else."""
    if not isinstance(prompts, Sequence) or not all(isinstance(text, str) for text in prompts):
        raise PromptTypeError(
            f"a prompt of type {type(prompts).__name__}",
            "text, a list of texts, or a list of messages",
            "Pass one of these.",
        )
    return [str(text) for text in prompts]


def prompt_token_ids(tokenizer: Tokenizer, prompt: Any, *, oai_like: bool = False) -> list[int]:
    """Return token ids of a text or a conversation.

    TypeError for another type and for a conversation without a chat template; ValueError when it
    cannot be tokenised. `oai_like`: contents may be lists of parts with a "text", as in OpenAI's
    API.
    """
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    if not is_conversation(prompt):
        raise PromptTypeError(
            f"a prompt of type {type(prompt).__name__}",
            "text, or a list of messages",
            "Pass one of these.",
        )
    messages = [_joined_parts(message) for message in prompt] if oai_like else list(prompt)
    try:
        return tokenizer.apply_chat_template(messages)
    except UnsupportedError as error:
        raise PromptTypeError(str(error)) from None


def _joined_parts(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    strange = [
        part
        for part in content
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str)
    ]
    if strange:
        raise RequestError(
            f"the content part {strange[0]!r}",
            'parts with a "text": no model has vision yet',
            "Remove this part.",
        )
    return {**message, "content": "".join(part["text"] for part in content)}


def as_params(params: Any, default: SamplingParams) -> SamplingParams:
    """Return SamplingParams for SamplingParams, a mapping of their fields, or None. TypeError
    otherwise.

    Without max_tokens, the max_tokens of `default` applies.
    """
    if params is None:
        return default
    if isinstance(params, Mapping):
        params = SamplingParams(**params)
    if isinstance(params, SamplingParams):
        params = with_length(params, default.max_tokens)
        if params.max_tokens == 0:
            raise RequestError("max_tokens = 0", "at least 1", "Use LLM to score a prompt alone.")
        return params
    raise PromptTypeError(
        f"sampling parameters of type {type(params).__name__}",
        "SamplingParams or a dict",
        "Pass SamplingParams(...).",
    )


class PromptText:
    """The text of a generation's first row, read from its states."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self._reader = CompletionReader(request, tokenizer, abort=lambda _: None)
        self._stop_ids = request.sampling.stop_token_ids
        self._column = -1
        self.state: SampleState | None = None

    @property
    def done(self) -> bool:
        """Whether the text has ended: at a stop token, a stop text or the max length."""
        return self._reader.done

    def feed(self, state: SampleState) -> str:
        """Return the text that a state adds."""
        if self._column < 0:
            self._column = int(state.padded_length)
        self.state = state
        end = int(state.current_length)
        ids = np.asarray(state.sequences)[0, self._column : end]
        mask = np.asarray(state.model_kwargs["attention_mask"])[0, self._column : end]
        self._column = end
        new = tuple(int(t) for t in ids[mask > 0])
        reason: FinishReason | None = None
        if bool(np.asarray(state.is_sequence_finished)[0]):
            reason = "stop" if new and new[-1] in self._stop_ids else "length"
        self._reader.feed(TokenEvent(new, reason))
        chunk = self._reader.read()
        return "" if chunk is None else chunk.delta_text

    def output(self) -> PromptOutput:
        """Return the result so far."""
        rate = float(self.state.tokens_per_second) if self.state is not None else 0.0
        return PromptOutput(
            text=self._reader.text,
            generated_tokens=len(self._reader.token_ids),
            tokens_per_second=rate if rate > 0 else None,
            finish_reason=self._reader.finish_reason,
        )


def read_states(
    text: PromptText,
    states: Iterable[SampleState],
    is_cancelled: Callable[[], bool] = lambda: False,
) -> Generator[str, None, SampleState]:
    """Yield the text of `states` piece by piece until it ends; return the last state."""
    for state in states:
        delta = text.feed(state)
        if delta:
            yield delta
        if text.done or is_cancelled():
            break
    assert text.state is not None, "a generation yields at least one state"
    return text.state
