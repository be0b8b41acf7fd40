"""Compares the tokens of two runs: equal, or first different where only rounding decides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.contracts.sampler import SamplingState
from enginebay.types import SamplingParams, key_of
from enginebay_testing.reference import ReferenceModel
from enginebay_testing.sampling_oracle import device_params

TOLERANCE = 1e-3
"""How far rounding may move a logit, where weights do not ask for inputs that are rounded to int8:
`ReferenceModel.rounding` is how far these move it besides.
"""

MAX_NEAR_TIES = 0.1
"""Max share of rows that may differ at a near-tie."""

NUM_PERTURBATIONS = 64
"""Number of perturbed rows: rows are padded to a multiple of it, so that few programs compile."""

WIDTH = 256
"""Sequences are padded to a multiple of this length, because each length is compiled."""


def assert_same_tokens(
    reference: ReferenceModel,
    prompts: Sequence[Sequence[int]],
    first: Sequence[Sequence[int]],
    second: Sequence[Sequence[int]],
    params: SamplingParams,
) -> None:
    """Check that each row is equal in both runs, or first differs where rounding decides between
    the two tokens; only few rows may differ.
    """
    different = 0
    for prompt, a, b in zip(prompts, first, second, strict=True):
        assert len(a) == len(b), (
            f"a prompt of {len(prompt)} tokens gave {len(a)} and {len(b)} tokens"
        )
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
        if at is None:
            continue
        different += 1
        tie = {a[at], b[at]} <= possible_tokens(reference, prompt, params, a[:at])
        assert tie, (
            f"a prompt of {len(prompt)} tokens: token {at} is {a[at]} and {b[at]}, not a near-tie"
        )
    assert different <= MAX_NEAR_TIES * len(prompts), f"{different} of {len(prompts)} rows differ"


def first_impossible_token(
    reference: ReferenceModel, prompt: Sequence[int], output: Sequence[int], params: SamplingParams
) -> int | None:
    """Return the index of the first output token that the sampler does not draw after the tokens
    before it, or None.
    """
    logits = reference.logits([*prompt, *output])[len(prompt) - 1 : -1]
    exact = _sampled(reference, logits, np.arange(len(output)), prompt, output, params)
    for at in map(int, np.flatnonzero(exact != np.asarray(output))):
        if output[at] not in possible_tokens(reference, prompt, params, output[:at]):
            return at
    return None


def possible_tokens(
    reference: ReferenceModel,
    prompt: Sequence[int],
    params: SamplingParams,
    output: Sequence[int] = (),
    index: int = 0,
) -> set[int]:
    """Return the tokens that the plan's sampler draws after `prompt` and `output` when no logit
    moves by more than TOLERANCE and `reference.rounding`.

    `index` is the index of the completion. All rows have one key and one position, so that only the
    logits differ: the reference's own logits, then logits that each move by this much up or down,
    then smaller moves.
    """
    logits = reference.logits([*prompt, *output])[-1]
    most = TOLERANCE + reference.rounding([*prompt, *output])[-1]
    rng = np.random.default_rng(0)
    moves = rng.uniform(-1.0, 1.0, (NUM_PERTURBATIONS, len(logits)))
    moves[: NUM_PERTURBATIONS // 2] = np.sign(moves[: NUM_PERTURBATIONS // 2])
    moves[0] = 0.0
    nearby = (logits + most * moves).astype(np.float32)
    after = np.full(NUM_PERTURBATIONS, len(output))
    return {
        int(t)
        for t in _sampled(
            reference, nearby, after, prompt=prompt, output=output, params=params, index=index
        )
    }


def _sampled(
    reference: ReferenceModel,
    logits: np.ndarray,
    after: np.ndarray,
    prompt: Sequence[int],
    output: Sequence[int],
    params: SamplingParams,
    index: int = 0,
) -> np.ndarray:
    """Draw token ids from logits f32 [S, vocab] for a completion of a request; row i is drawn after
    after[i] output tokens.
    """
    num_rows, vocab = logits.shape
    size = -(-num_rows // NUM_PERTURBATIONS) * NUM_PERTURBATIONS
    padded = np.zeros((size, vocab), np.float32)
    padded[:num_rows] = logits
    positions = np.full(size, len(prompt), np.int32)
    positions[:num_rows] += after.astype(np.int32)
    tokens = np.zeros(-(-(len(prompt) + len(output)) // WIDTH) * WIDTH, np.int32)
    tokens[: len(prompt) + len(output)] = [*prompt, *output]
    seed_words = jnp.asarray(key_of(params.seed or 0), jnp.uint32)
    key = jax.random.wrap_key_data(seed_words, impl="threefry2x32")
    words = np.asarray(jax.random.key_data(jax.random.fold_in(key, index)))

    columns: dict[str, Any] = {  # NumPy arrays: JAX would compile a program for each array
        "keys": np.tile(words, (size, 1)),
        "positions": positions,
        "params": device_params([params] * size),
        "token_ids": np.tile(tokens, (size, 1)),
        "prompt_lengths": np.full(size, len(prompt), np.int32),
    }
    return np.asarray(reference.sample(padded, SamplingState(**columns)))[:num_rows]
