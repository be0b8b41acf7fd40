"""Requests for benchmarks: random token ids from seeds, the same for every engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from enginebay.types import SamplingParams


@dataclasses.dataclass(frozen=True)
class Workload:
    """Prompts, and the number of tokens for each; greedy, end-of-sequence ignored."""

    prompts: tuple[tuple[int, ...], ...]
    new_tokens: tuple[int, ...]

    @property
    def params(self) -> list[SamplingParams]:
        """Return sampling parameters, one per prompt."""
        return [
            SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in self.new_tokens
        ]

    @property
    def num_output_tokens(self) -> int:
        """Return the number of tokens that a run generates."""
        return sum(self.new_tokens)


def with_tokens_of(workload: Workload, seed: Sequence[int], vocab_size: int) -> Workload:
    """Return the requests with other random tokens, and the same lengths."""
    rng = np.random.default_rng(list(seed))
    drawn = (rng.integers(0, vocab_size, len(prompt)) for prompt in workload.prompts)
    prompts = tuple(tuple(map(int, tokens)) for tokens in drawn)
    return dataclasses.replace(workload, prompts=prompts)


def one_prompt(seed: int, vocab_size: int, prompt_len: int, new_tokens: int) -> Workload:
    """Return a single request."""
    rng = np.random.default_rng(seed)
    return Workload(
        (tuple(int(t) for t in rng.integers(0, vocab_size, prompt_len)),), (new_tokens,)
    )


def mixed_batch(
    seed: int, vocab_size: int, num_requests: int, longest_prompt: int, longest_output: int
) -> Workload:
    """Return requests of uniformly random lengths, from a sixteenth of the max length."""
    rng = np.random.default_rng(seed)

    def lengths(longest: int) -> list[int]:
        return [int(n) for n in rng.integers(max(1, longest // 16), longest + 1, num_requests)]

    prompts = tuple(
        tuple(int(t) for t in rng.integers(0, vocab_size, n)) for n in lengths(longest_prompt)
    )
    return Workload(prompts, tuple(lengths(longest_output)))
