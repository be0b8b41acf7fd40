"""Preparer: tokenises prompts, validates every value, and makes requests, before any is queued."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import secrets
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Unpack

import numpy as np

from enginebay.contracts.constraint import Vocabulary, forms_of
from enginebay.contracts.model import TokenInfo
from enginebay.contracts.processor import RowFacts, Sizes
from enginebay.contracts.text import ChatPrompt, Tokenizer
from enginebay.errors import PromptLengthError, RequestError
from enginebay.serving.abilities import (
    Abilities,
    check_embeds,
    check_logprobs,
    check_penalties,
    check_pooling,
)
from enginebay.serving.choice import BestOf
from enginebay.serving.priority import (
    BatchKeywords,
    RequestKeywords,
    RequestPriority,
    one_per_prompt,
    priorities_of,
)
from enginebay.serving.prompts import Prompt, Prompts, as_prompts, check_prompt
from enginebay.serving.requested_processors import requested_processors
from enginebay.serving.requests import Completion
from enginebay.serving.segments import Segments
from enginebay.types import (
    ALL_LOGPROBS,
    MAX_STOP_TOKENS,
    FrozenSampling,
    Pooling,
    Request,
    SamplingParams,
    as_sampling_params,
    key_of,
    takes_best,
)

Param = SamplingParams | Mapping[str, Any] | None
"""How one request is sampled. A dict has fields of SamplingParams; None means the defaults."""

Params = Param | Sequence[Param]

_NO_SAMPLING = SamplingParams(max_tokens=0, prompt_logprobs=None, seed=0)
"""Parameters of a request for hidden states, which generates nothing."""


class Preparer:
    """Makes the requests of one engine, from its tokenizer, its limits and its capabilities."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        tokens: TokenInfo,
        vocab_size: int,
        max_model_len: int,
        *,
        abilities: Abilities,
        seed: int | None,
    ) -> None:
        self.tokenizer = tokenizer
        self.tokens = tokens
        self.vocab_size = vocab_size
        self.sizes = Sizes(vocab_size, max_model_len, abilities.padding_from)
        self._num_token_ids = self.sizes.num_token_ids
        self.max_model_len = max_model_len
        self.max_cached: int | None = None
        """The largest number of tokens that the cache holds for one request
        (`Ledger.max_tokens`); None: max_model_len is the limit.
        """
        self.abilities = abilities
        self._guide = abilities.make_guides(Vocabulary(tokenizer, vocab_size, tokens.eos_token_ids))
        self._seeds = np.random.default_rng(secrets.randbits(64) if seed is None else seed)

    def close(self) -> None:
        """End the worker processes. They start again with the next chat or the next constraint."""
        self.tokenizer.close()
        self._guide.close()

    def prepare(
        self, prompts: Prompts, params: Params, **turns: Unpack[BatchKeywords]
    ) -> list[Completion]:
        """One Completion per prompt, in order. Raises RequestError for the first prompt or value
        that is invalid.
        """
        listed = as_prompts(prompts)
        turn_of = priorities_of(len(listed), **turns)
        given = one_per_prompt(len(listed), params, "sampling parameters")
        each = map(as_sampling_params, given)
        return [self._prepare_one(*one) for one in zip(listed, each, turn_of, strict=True)]

    def prepare_one(
        self, prompt: Prompt, params: Param, **turn: Unpack[RequestKeywords]
    ) -> list[Completion]:
        """A list with the Completion of one prompt. Here a list of token ids is always one prompt,
        and a list of prompts is refused.
        """
        check_prompt(prompt)
        return self.prepare([prompt], params, **turn)

    def prepare_embed(
        self, prompts: Prompts, pooling: Pooling, **turns: Unpack[BatchKeywords]
    ) -> list[Completion]:
        """One Completion per prompt, of requests for pooled hidden states. RequestError when the
        engine cannot return hidden states.
        """
        check_pooling(pooling, self.abilities)
        listed = as_prompts(prompts)
        pairs = zip(listed, priorities_of(len(listed), **turns), strict=True)
        return [self._prepare_one(one, _NO_SAMPLING, own, pooling) for one, own in pairs]

    def room(self, num_prompt: int) -> int:
        """The largest number of new tokens after a prompt of `num_prompt` tokens that fits context
        and cache; at least 1.
        """
        cached = self.max_model_len if self.max_cached is None else self.max_cached
        return max(1, min(self.max_model_len, cached) - num_prompt)

    def with_defaults(self, params: SamplingParams, num_prompt: int) -> SamplingParams:
        """`params` with the checkpoint's defaults in every field that it does not set. Applying it
        twice changes nothing more.

        A max_tokens that comes from the checkpoint is reduced to the room after a prompt of
        `num_prompt` tokens.
        """
        missing = self.abilities.defaults.missing_in(params)
        filled = params.model_copy(update=missing) if missing else params
        if filled.max_tokens is None or "max_tokens" in params.model_fields_set:
            return filled
        return filled.model_copy(
            update={"max_tokens": min(filled.max_tokens, self.room(num_prompt))}
        )

    def _prepare_one(
        self,
        prompt: Prompt,
        params: SamplingParams,
        priority: RequestPriority,
        pooling: Pooling | None = None,
    ) -> Completion:
        text = prompt if isinstance(prompt, str) else None
        embeds = None
        if isinstance(prompt, Segments):
            check_embeds(params, self.abilities)
            check = functools.partial(self._check_ids, what="token id")
            token_ids, embeds = prompt.resolve(self.abilities.hidden_size, self.vocab_size, check)
        else:
            if text is None:
                self._check_room(len(prompt), params)
                token_ids = [int(t) for t in prompt]
            elif params.max_tokens == 0:
                token_ids = encode_within(self.tokenizer, text, self.max_model_len, generates=False)
            else:
                most = self.max_model_len - 1
                token_ids = self.tokenizer.encode(text, max_prompt_tokens=most)
            self._check_room(len(token_ids), params)
            self._check_ids(token_ids, "token id")
        if pooling is None:
            params = self.with_defaults(params, len(token_ids))
            check_length(params)
        self._check(token_ids, params)
        check_penalties(params, self.abilities)
        check_logprobs(params, self.abilities)
        array = np.asarray(token_ids, np.int32)
        processors = self.abilities.processors.entries
        wanted = requested_processors(params, self.tokenizer, processors)
        sampling = self._freeze(params, array, wanted)
        # Only the first completion computes the prompt's log-probabilities.
        others = dataclasses.replace(sampling, num_prompt_logprobs=None)
        grammar = self._guide.grammar(params) if forms_of(params) else None
        adapter = self.abilities.adapter(priority.lora)
        request_id = f"request-{uuid.uuid4().hex}"
        seed = int(self._seeds.integers(0, 2**63)) if params.seed is None else params.seed
        now_s = time.monotonic()
        requests = [
            Request(
                request_id=f"{request_id}/{index}",
                prompt_token_ids=array,
                sampling=others if index else sampling,
                key=key_of(seed),
                arrival_s=now_s,
                priority=priority.priority,
                parent_id=request_id,
                index=index,
                tenant=priority.tenant,
                embeds=embeds if embeds and len(embeds.positions) else None,
                cache_salt=priority.cache_salt,
                adapter=adapter,
                grammar=grammar,
                pooling=pooling,
                begins_text=isinstance(prompt, ChatPrompt),
            )
            for index in range(params.best_of or params.n)
        ]
        return Completion(request_id, text, token_ids, tuple(requests), BestOf.of(params))

    def _check_room(self, num_tokens: int, params: SamplingParams) -> None:
        """RequestError for a prompt of too many tokens. A request that generates nothing needs no
        room for a new token.
        """
        most = self.max_model_len - (params.max_tokens != 0)
        if num_tokens > most:
            why = "which leaves room for one new token" if params.max_tokens != 0 else "the context"
            raise RequestError(
                f"a prompt of {num_tokens} tokens",
                f"at most {most}, {why}",
                "Shorten the prompt, or pass a larger --max-model-len.",
            )

    def _check(self, token_ids: list[int], params: SamplingParams) -> None:
        if not token_ids:
            raise RequestError(
                "an empty prompt",
                "at least one token",
                "Pass some text, or a begin-of-sequence token.",
            )
        self._check_room(len(token_ids), params)
        num_allowed = len(params.allowed_token_ids or ())
        if num_allowed > self._num_token_ids:
            raise RequestError(
                f"allowed_token_ids = a list of {num_allowed} ids",
                f"at most {self._num_token_ids}, the model's vocabulary",
                "Pass each id once.",
            )
        if self.abilities.greedy_only and params.temperature > 0:
            raise RequestError(
                f"temperature = {params.temperature} with a sampler that is greedy only",
                "temperature = 0",
                "Pass --sampler standard to sample.",
            )

    def _check_ids(self, token_ids: Iterable[int], what: str) -> None:
        size = self._num_token_ids
        wrong = [t for t in token_ids if not 0 <= t < size]
        if wrong:
            whose = "model's" if self.sizes.padding_from is None else "tokenizer's"
            raise RequestError(
                f"{what} {wrong[0]}",
                f"0 to {size - 1}, the {whose} vocabulary",
                "Encode the text with llm.tokenizer.",
            )

    def _freeze(
        self, params: SamplingParams, prompt: np.ndarray, wanted: Mapping[str, Mapping[str, Any]]
    ) -> FrozenSampling:
        """The sampling of a request. `wanted`: options of the logits processors that it uses."""
        eos = () if params.ignore_eos else self.tokens.eos_token_ids
        self._check_ids(params.stop_token_ids, "stop token id")
        self._check_ids(
            itertools.chain.from_iterable(params.stop_words_ids), "token id in stop_words_ids"
        )
        stop_ids = tuple(dict.fromkeys((*eos, *params.stop_token_ids)))
        if len(stop_ids) > MAX_STOP_TOKENS:
            raise RequestError(
                f"{len(stop_ids)} stop tokens, end-of-sequence tokens included",
                f"at most {MAX_STOP_TOKENS}",
                "Pass fewer stop_token_ids.",
            )
        room = self.max_model_len - len(prompt)
        facts = RowFacts(prompt, stop_ids, self.sizes)
        chosen = self.abilities.processors
        used = chosen.rows(wanted, facts)
        if takes_best(params) and not chosen.changes_best(used):
            used = ()
        num_logprobs = self.vocab_size if params.logprobs == ALL_LOGPROBS else params.logprobs
        if num_logprobs is None and BestOf.of(params) is not None:
            num_logprobs = 0  # the log-probability of each token itself
        return FrozenSampling(
            max_tokens=self.room(len(prompt))
            if params.max_tokens is None
            else min(params.max_tokens, room),
            params=params.model_copy(),
            stop_token_ids=stop_ids,
            num_logprobs=num_logprobs,
            num_prompt_logprobs=params.prompt_logprobs,
            processors=used,
            reads_tokens=chosen.reads_tokens(used),
        )


def encode_within(
    tokenizer: Tokenizer, text: str, max_model_len: int, *, generates: bool
) -> list[int]:
    """Return the token ids of a prompt. PromptLengthError for a text that certainly does not fit
    the context, with one new token if the request `generates`.
    """
    if generates:
        return tokenizer.encode(text, max_prompt_tokens=max_model_len - 1)
    try:
        return tokenizer.encode(text, max_prompt_tokens=max_model_len)
    except PromptLengthError as error:
        message = str(error).replace("which leaves room for one new token", "the context")
        raise PromptLengthError(message) from None


def check_length(params: SamplingParams) -> None:
    """RequestError for max_tokens = 0 in a request that asks for nothing else."""
    if params.max_tokens == 0 and params.prompt_logprobs is None:
        raise RequestError(
            "max_tokens = 0 without prompt_logprobs",
            "a number of at least 1; 0 with prompt_logprobs, which scores the prompt alone",
            "Pass max_tokens = 1.",
        )


def check_streamable(prepared: Sequence[Completion]) -> None:
    """RequestError for requests with best_of > n: which completions are returned is known only when
    all have ended.
    """
    for one in prepared:
        if one.choice is not None:
            raise RequestError(
                f"best_of = {len(one.requests)} with n = {one.choice.num_returned} in a stream, "
                "where the best completions are not known before the end",
                f"best_of = None, or {one.choice.num_returned}",
                "Leave best_of out, or call generate().",
            )
