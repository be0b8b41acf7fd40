"""From what a caller gives to requests: prompts are tokenised once, everything is validated before anything is queued."""

from __future__ import annotations

import dataclasses
import itertools
import secrets
import time
from collections.abc import Sequence

import numpy as np

from enginebay.errors import RequestError, explain
from enginebay.model import TokenInfo
from enginebay.text import Tokenizer
from enginebay.types import MAX_STOP_TOKENS, FrozenSampling, Request, SamplingParams

Prompt = str | Sequence[int]
Prompts = Prompt | Sequence[str] | Sequence[Sequence[int]]
Params = SamplingParams | Sequence[SamplingParams] | None


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """One prompt, its text when it was one, and its requests: one for each completion."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    requests: tuple[Request, ...]


class Preparer:
    """Makes requests for one engine: knows its tokenizer, its context and what its sampler can do."""

    def __init__(self, tokenizer: Tokenizer, tokens: TokenInfo, vocab_size: int, max_model_len: int, *, greedy_only: bool, seed: int | None) -> None:
        self.tokenizer = tokenizer
        self.tokens = tokens
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.greedy_only = greedy_only
        self._seeds = np.random.default_rng(secrets.randbits(64) if seed is None else seed)
        self._ids = itertools.count()

    def prepare(self, prompts: Prompts, params: Params) -> list[Prepared]:
        """One Prepared per prompt, in order. Raises RequestError for the first prompt or value that cannot be served."""
        listed = as_prompts(prompts)
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(listed)
        else:
            each = list(params)
            if len(each) != len(listed):
                raise RequestError(explain(f"{len(each)} sampling parameters for {len(listed)} prompts", "one for all, or one per prompt", "Give as many."))
        return [self._prepare_one(prompt, own) for prompt, own in zip(listed, each, strict=True)]

    def _prepare_one(self, prompt: Prompt, params: SamplingParams) -> Prepared:
        text = prompt if isinstance(prompt, str) else None
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else [int(t) for t in prompt]
        self._check(token_ids, params)
        sampling = self._freeze(params, len(token_ids))
        request_id = f"request-{next(self._ids)}"
        seed = int(self._seeds.integers(0, 2**63)) if params.seed is None else params.seed
        array = np.asarray(token_ids, np.int32)
        now_s = time.monotonic()
        requests = tuple(
            Request(
                request_id=f"{request_id}/{index}",
                prompt_token_ids=array,
                sampling=sampling,
                key=(seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF),
                arrival_s=now_s,
                parent_id=request_id,
                index=index,
            )
            for index in range(params.n)
        )
        return Prepared(request_id, text, token_ids, requests)

    def _check(self, token_ids: list[int], params: SamplingParams) -> None:
        if not token_ids:
            raise RequestError(explain("an empty prompt", "at least one token", "Give some text, or a begin-of-sequence token."))
        wrong = next((t for t in token_ids if not 0 <= t < self.vocab_size), None)
        if wrong is not None:
            raise RequestError(explain(f"token id {wrong}", f"0 to {self.vocab_size - 1}, the model's vocabulary", "Use the model's own tokenizer."))
        if len(token_ids) >= self.max_model_len:
            raise RequestError(
                explain(f"a prompt of {len(token_ids)} tokens", f"at most {self.max_model_len - 1}, which leaves room for one new token", "Shorten it, or raise max_model_len.")
            )
        if self.greedy_only and params.temperature > 0:
            raise RequestError(explain(f"temperature = {params.temperature} with a sampler that is greedy only", "temperature = 0", "Choose sampler standard to sample."))

    def _freeze(self, params: SamplingParams, num_prompt_tokens: int) -> FrozenSampling:
        eos = () if params.ignore_eos else self.tokens.eos_token_ids
        stop_ids = tuple(dict.fromkeys((*eos, *params.stop_token_ids)))
        if len(stop_ids) > MAX_STOP_TOKENS:
            raise RequestError(explain(f"{len(stop_ids)} stop tokens, end-of-sequence tokens included", f"at most {MAX_STOP_TOKENS}", "Give fewer."))
        return FrozenSampling(
            max_tokens=min(params.max_tokens, self.max_model_len - num_prompt_tokens),
            temperature=params.temperature,
            top_k=max(params.top_k, 0),
            top_p=params.top_p,
            min_p=params.min_p,
            stop=params.stop,
            stop_token_ids=stop_ids,
            include_stop_str_in_output=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
        )


def as_prompts(prompts: Prompts) -> list[Prompt]:
    """A list of prompts from one text, one list of token ids, or a list of either. RequestError for anything else."""
    if isinstance(prompts, str):
        return [prompts]
    listed = list(prompts)
    if listed and all(isinstance(p, int | np.integer) for p in listed):
        return [listed]  # type: ignore[list-item]
    for prompt in listed:
        ids = not isinstance(prompt, str) and isinstance(prompt, Sequence | np.ndarray) and all(isinstance(t, int | np.integer) for t in prompt)
        if not (isinstance(prompt, str) or ids):
            raise RequestError(explain(f"a prompt of type {type(prompt).__name__}", "text, or a list of token ids", "Convert it first."))
    return listed  # type: ignore[return-value]
