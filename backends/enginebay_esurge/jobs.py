"""From prompts to jobs: parameters by the callback, lengths that fit the context, requests under
the caller's ids.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from enginebay.errors import RequestError, explain
from enginebay.llm.choice import Choice
from enginebay.llm.prepare import Param, Preparer
from enginebay.llm.priority import Priority
from enginebay.llm.prompts import Prompt
from enginebay.types import Request, SamplingParams, as_sampling_params, with_length
from enginebay_esurge.context import ContextRules, Lengths, fit_lengths, truncate

SamplingCallback = Callable[[SamplingParams, dict[str, Any]], SamplingParams | None]

DEFAULT_MAX_TOKENS = 128
"""New tokens of a request that sets no max_tokens."""


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One prompt with its completions. `asked` are the lengths before they were made to fit;
    num_new None: as many as fit.
    """

    request_id: str
    prompt: str
    prompt_token_ids: list[int]
    requests: tuple[Request, ...]
    original_prompt_tokens: int
    requested_new_tokens: int | None
    lengths: Lengths
    choice: Choice | None = None
    """Which of the completions are returned in the end; None: all."""


class Jobs:
    """Makes the jobs of one engine. Safe from several threads."""

    def __init__(
        self,
        preparer: Preparer,
        rules: ContextRules,
        *,
        decodes_truncated: bool,
        returns_logprobs: bool,
    ) -> None:
        self.rules = rules
        self.callback: SamplingCallback | None = None
        self._preparer = preparer
        self._decodes_truncated = decodes_truncated
        self._returns_logprobs = returns_logprobs
        self._lock = threading.Lock()

    def close(self) -> None:
        """End the worker processes; they start again when they are needed."""
        self._preparer.close()

    def make(
        self,
        prompts: Sequence[Prompt],
        params: Param,
        request_ids: Sequence[str],
        standing: Sequence[Priority],
        engine: Any,
    ) -> list[Job]:
        """A checked job of each prompt, in order. RequestError (a ValueError) for the first that
        cannot be served.
        """
        checked = with_length(as_sampling_params(params), DEFAULT_MAX_TOKENS)
        return [
            self._make_one(prompt, checked, request_id, own, engine)
            for prompt, request_id, own in zip(prompts, request_ids, standing, strict=True)
        ]

    def _make_one(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        standing: Priority,
        engine: Any,
    ) -> Job:
        tokenizer = self._preparer.tokenizer
        if isinstance(prompt, str):
            text, token_ids = prompt, tokenizer.encode(prompt)
        else:
            token_ids = [int(token_id) for token_id in prompt]
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
            token_ids = truncate(token_ids, lengths.num_prompt, self.rules.truncate_mode)
            text = self._text_of(token_ids) if self._decodes_truncated else text
        changes: dict[str, Any] = {"max_tokens": lengths.num_new}
        if self._returns_logprobs and own.logprobs is None:
            changes["logprobs"] = 0  # of the chosen tokens alone
        fitting = own.model_copy(update=changes)
        with self._lock:
            [prepared] = self._preparer.prepare_one(
                token_ids, fitting, priority=standing.priority, tenant=standing.tenant or None
            )
        requests = tuple(
            dataclasses.replace(r, request_id=f"{request_id}/{r.index}", parent_id=request_id)
            for r in prepared.requests
        )
        return Job(
            request_id,
            text,
            prepared.prompt_token_ids,
            requests,
            before,
            own.max_tokens,
            lengths,
            prepared.choice,
        )

    def _text_of(self, token_ids: list[int]) -> str:
        wrong = not all(0 <= token_id < self._preparer.vocab_size for token_id in token_ids)
        return (
            "" if wrong else self._preparer.tokenizer.decode(token_ids, skip_special_tokens=False)
        )


def apply_callback(
    callback: SamplingCallback | None, params: SamplingParams, about: Mapping[str, Any]
) -> SamplingParams:
    """What a callback makes of a copy of `params`: what it returns, or for None the copy, as it is
    then.

    When it raises or returns something else, that is logged, and the parameters are as they were.
    """
    if callback is None:
        return params.model_copy(deep=True)
    copy = params.model_copy(deep=True)
    log = logging.getLogger("enginebay.esurge")
    try:
        made = callback(copy, dict(about))
    except Exception:  # whatever the caller's own function raises must not end the request
        log.exception(
            "the sampling parameters callback failed; request %s goes on without",
            about["request_id"],
        )
        return params.model_copy(deep=True)
    if made is None:
        return copy
    if not isinstance(made, SamplingParams):
        log.error(
            "the sampling parameters callback returned a %s: it is ignored", type(made).__name__
        )
        return params.model_copy(deep=True)
    return made.model_copy(deep=True)


def ids_for(num_prompts: int, request_id: str | Sequence[str] | None) -> list[str]:
    """An id for each prompt: the caller's, or new ones. RequestError when there are more or fewer,
    or one twice.
    """
    if request_id is None:
        return [f"esurge-{uuid.uuid4().hex}" for _ in range(num_prompts)]
    ids = [request_id] if isinstance(request_id, str) else list(request_id)
    if len(ids) != num_prompts:
        raise RequestError(
            explain(
                f"{len(ids)} request ids for {num_prompts} prompts", "one for each", "Give as many."
            )
        )
    if len(set(ids)) != len(ids) or not all(isinstance(i, str) and i for i in ids):
        raise RequestError(
            explain(
                f"request ids {ids}",
                "texts of which each is there once",
                "Choose others, or give none.",
            )
        )
    return ids


class Active:
    """Jobs under way by their id. Safe from several threads."""

    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}
        self._lock = (
            threading.RLock()
        )  # garbage may be collected, and a stream ended, while it is held

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, jobs: Sequence[Job]) -> None:
        """Take jobs in, all or none. RequestError for an id that is under way."""
        with self._lock:
            taken = [job.request_id for job in jobs if job.request_id in self._jobs]
            if taken:
                raise RequestError(
                    explain(
                        f"request id {taken[0]!r}, which is under way",
                        "one that is not",
                        "Choose another, wait, or abort it.",
                    )
                )
            self._jobs |= {job.request_id: job for job in jobs}

    def find(self, request_id: str) -> Job | None:
        """The job of an id."""
        return self._jobs.get(request_id)

    def remove(self, jobs: Sequence[Job]) -> int:
        """Forget jobs, and return how many were not forgotten already."""
        with self._lock:
            known = [job for job in jobs if self._jobs.get(job.request_id) is job]
            for job in known:
                del self._jobs[job.request_id]
            return len(known)
