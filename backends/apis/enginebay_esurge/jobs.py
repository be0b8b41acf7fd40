"""Jobs: prompts with the parameters after the callback, lengths that fit the context, and the
caller's request ids.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from enginebay.contracts.text import ChatPrompt
from enginebay.errors import RequestError
from enginebay.serving.prepare import Param, Preparer
from enginebay.serving.priority import RequestPriority
from enginebay.serving.prompts import Prompt
from enginebay.serving.requests import Completion, with_id
from enginebay.serving.segments import Segments
from enginebay.types import SamplingParams, as_sampling_params
from enginebay_esurge.context import ContextRules, Lengths, fit_lengths, truncate
from enginebay_shared.params import with_length

SamplingCallback = Callable[[SamplingParams, dict[str, Any]], SamplingParams | None]

log = logging.getLogger("enginebay.esurge")

DEFAULT_MAX_TOKENS = 128
"""max_tokens of a request that does not set it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One prompt with its completions and its text. `requested_new_tokens` and
    `original_prompt_tokens` are the lengths before the fit; requested_new_tokens None means as many
    as fit.
    """

    prepared: Completion
    prompt: str
    original_prompt_tokens: int
    requested_new_tokens: int | None
    lengths: Lengths


class Jobs:
    """Makes the jobs of one engine. Thread-safe."""

    def __init__(
        self,
        preparer: Preparer,
        rules: ContextRules,
        callback: SamplingCallback | None = None,
        *,
        decodes_truncated: bool,
        returns_logprobs: bool,
    ) -> None:
        """The context is the shorter one of the model's and that of `rules`."""
        self.rules = dataclasses.replace(rules, max_model_len=preparer.max_model_len)
        self.callback = callback
        self.tokenizer = preparer.tokenizer
        self._preparer = preparer
        self._decodes_truncated = decodes_truncated
        self._returns_logprobs = returns_logprobs
        self._lock = threading.Lock()

    def close(self) -> None:
        """Stop the worker processes. They start again when needed."""
        self._preparer.close()

    def make(
        self,
        prompts: Sequence[Prompt],
        params: Param,
        request_ids: Sequence[str],
        priorities: Sequence[RequestPriority],
        engine: Any,
    ) -> list[Job]:
        """Return a checked job for each prompt, in order. RequestError (a ValueError) for the first
        prompt that cannot be served.
        """
        checked = with_length(as_sampling_params(params), DEFAULT_MAX_TOKENS)
        return [
            self._make_one(prompt, checked, request_id, own, engine)
            for prompt, request_id, own in zip(prompts, request_ids, priorities, strict=True)
        ]

    def _make_one(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        priority: RequestPriority,
        engine: Any,
    ) -> Job:
        if isinstance(prompt, Segments):
            todo = "Pass Segments to LLM.generate()."
            raise RequestError("Segments for eSurge", "text, or a list of token ids", todo)
        if isinstance(prompt, str):
            text, token_ids = prompt, self.tokenizer.encode(prompt)
        else:
            token_ids = [int(token_id) for token_id in prompt]
            if isinstance(prompt, ChatPrompt):
                token_ids = ChatPrompt(token_ids)
            text = self._text_of(token_ids)
        before = len(token_ids)
        about = {"request_id": request_id, "prompt": text, "engine": engine}
        changed = with_length(apply_callback(self.callback, params, about), DEFAULT_MAX_TOKENS)
        own = self._preparer.with_defaults(changed, before)
        lengths = fit_lengths(before, own.max_tokens, self.rules)
        if own.max_tokens is None:
            num_new = min(lengths.num_new, self._preparer.room(lengths.num_prompt))
            lengths = dataclasses.replace(lengths, num_new=num_new)
        if lengths.num_prompt < before:
            kind = type(token_ids)
            token_ids = kind(truncate(token_ids, lengths.num_prompt, self.rules.truncate_mode))
            text = self._text_of(token_ids) if self._decodes_truncated else text
        changes: dict[str, Any] = {"max_tokens": lengths.num_new}
        if self._returns_logprobs and own.logprobs is None:
            changes["logprobs"] = 0  # only those of the sampled tokens
        fitting = own.model_copy(update=changes)
        with self._lock:
            [prepared] = self._preparer.prepare_one(
                token_ids,
                fitting,
                priority=priority.priority,
                tenant=priority.tenant or None,
                cache_salt=priority.cache_salt or None,
                lora=priority.lora or None,
            )
        return Job(with_id(prepared, request_id), text, before, own.max_tokens, lengths)

    def _text_of(self, token_ids: list[int]) -> str:
        wrong = not all(
            0 <= token_id < self._preparer.sizes.num_token_ids for token_id in token_ids
        )
        return "" if wrong else self.tokenizer.decode(token_ids, skip_special_tokens=False)


def apply_callback(
    callback: SamplingCallback | None, params: SamplingParams, about: Mapping[str, Any]
) -> SamplingParams:
    """Return the parameters after the callback: its result, or for None the copy that it may have
    changed.

    If it raises, or returns another type, this is logged, and the parameters are unchanged.
    """
    copy = params.model_copy(deep=True)
    if callback is None:
        return copy
    try:
        made = callback(copy, dict(about))
    except Exception:  # an error of the caller's function must not end the request
        text = "the sampling parameters callback failed; request %s runs without it"
        log.exception(text, about["request_id"])
        return params.model_copy(deep=True)
    if made is None:
        return copy
    if not isinstance(made, SamplingParams):
        text = "the sampling parameters callback returned a %s, which is ignored"
        log.error(text, type(made).__name__)
        made = params
    return made.model_copy(deep=True)


def ids_for(num_prompts: int, request_id: str | Sequence[str] | None) -> list[str]:
    """Return an id for each prompt: the caller's, or new ones. RequestError for another number of
    ids, or equal ids.
    """
    if request_id is None:
        return [f"esurge-{uuid.uuid4().hex}" for _ in range(num_prompts)]
    ids = [request_id] if isinstance(request_id, str) else list(request_id)
    if len(ids) != num_prompts:
        raise RequestError(
            f"{len(ids)} request ids for {num_prompts} prompts",
            "one id for each prompt",
            f"Pass {num_prompts} ids, or None.",
        )
    if len(set(ids)) != len(ids) or not all(isinstance(i, str) and i for i in ids):
        raise RequestError(
            f"request ids {ids}",
            "different strings that are not empty",
            "Pass other ids, or None.",
        )
    return ids
