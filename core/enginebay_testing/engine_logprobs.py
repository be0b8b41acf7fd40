"""Compares the log-probabilities of an engine with log_softmax of a single forward pass over all
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from enginebay.errors import RequestError
from enginebay.outputs import CompletionOutput
from enginebay.serving import LLM
from enginebay.serving.abilities import Abilities
from enginebay.types import ALL_LOGPROBS, MAX_LOGPROBS, SamplingParams
from enginebay_testing.reference import ReferenceModel
from enginebay_testing.subject import (
    LENGTHS,
    EngineSubject,
    greedy,
    penalty_params,
    random_prompts,
    seeded,
)

TOLERANCE = 1e-4
"""Max difference between an engine's log-probability and the reference, in nats, in f32."""

ASKED = (None, 0, 5, None, MAX_LOGPROBS, 1)
"""`logprobs` of the rows of a batch, in the order of LENGTHS."""


def logprobs_are_the_models(subject: EngineSubject) -> None:
    """Log-probabilities are log_softmax of the model's own logits, alone and in a batch with
    requests that want none.

    Prompts are cut into chunks, and sampling parameters change nothing. An engine that does not
    declare log-probabilities refuses such requests. An engine that declares full_vocab_logprobs
    also returns log-probabilities of prompts, even from a cached prefix, and of the whole
    vocabulary.
    """
    prompts = random_prompts(subject.vocab_size, LENGTHS, seed=13)
    kinds = (greedy, seeded, penalty_params)
    params = [asking(kinds[i % 3](12), num_best) for i, num_best in enumerate(ASKED)]
    with subject.shared() as llm:
        if "logprobs" not in Abilities.of(llm.plan).capabilities:
            _check_refused(llm, prompts[0])
            return
        together = llm.generate(prompts, params)
        alone = [
            llm.generate([prompt], own)[0] for prompt, own in zip(prompts, params, strict=True)
        ]
        if "full_vocab_logprobs" in Abilities.of(llm.plan).capabilities:
            _check_wide(subject.reference(), llm, max(prompts, key=len))
    for outputs in (together, alone):
        for prompt, own, output in zip(prompts, params, outputs, strict=True):
            check_returned_logprobs(subject.reference(), prompt, output.outputs[0], own.logprobs)


def asking(params: SamplingParams, num_best: int | None) -> SamplingParams:
    """Return the same parameters with log-probabilities."""
    return params.model_copy(update={"logprobs": num_best})


def check_returned_logprobs(
    reference: ReferenceModel,
    prompt: Sequence[int],
    completion: CompletionOutput,
    num_best: int | None,
) -> None:
    """Check a completion: `num_best` entries per token, each within TOLERANCE of the reference's
    log_softmax.
    """
    entries, token_ids = completion.logprobs, completion.token_ids
    case = f"a prompt of {len(prompt)} tokens, logprobs = {num_best}"
    if num_best is None:
        assert entries is None, f"{case}: log-probabilities came without a request for them"
        assert completion.cumulative_logprob is None, (
            f"{case}: cumulative_logprob came without a request for it"
        )
        return
    assert entries is not None, f"{case}: no log-probabilities"
    assert len(entries) == len(token_ids), (
        f"{case}: {len(entries)} entries for {len(token_ids)} tokens"
    )
    logits = reference.logits([*prompt, *token_ids])[len(prompt) - 1 : -1]
    expected = log_softmax(logits)[:, : reference.plan.model.info.num_token_ids]
    for at, (token_id, one) in enumerate(zip(token_ids, entries, strict=True)):
        here = f"{case}, token {at}"
        _check_entry(expected[at], token_id, one, min(num_best, expected.shape[1]), here)
    total = sum(one[token_id] for one, token_id in zip(entries, token_ids, strict=True))
    assert completion.cumulative_logprob is not None, f"{case}: no cumulative_logprob"
    assert abs(completion.cumulative_logprob - total) < 1e-9, (
        f"{case}: cumulative_logprob is not the sum of the tokens' log-probabilities"
    )


def check_prompt_logprobs(
    reference: ReferenceModel,
    prompt: Sequence[int],
    entries: Sequence[dict[int, float] | None] | None,
    num_best: int,
) -> None:
    """Check a prompt: None for the first token, then `num_best` entries per token, each within
    TOLERANCE of the reference's log_softmax.
    """
    case = f"a prompt of {len(prompt)} tokens, prompt_logprobs = {num_best}"
    assert entries is not None, f"{case}: no prompt log-probabilities"
    assert len(entries) == len(prompt), f"{case}: {len(entries)} entries"
    assert entries[0] is None, f"{case}: the first token has log-probabilities, expected None"
    num_ids = reference.plan.model.info.num_token_ids
    expected = log_softmax(reference.logits(prompt))[:, :num_ids]
    for at, (token_id, one) in enumerate(zip(prompt[1:], entries[1:], strict=True)):
        assert one is not None, f"{case}, token {at + 1}: no log-probabilities"
        _check_entry(
            expected[at], token_id, one, min(num_best, expected.shape[1]), f"{case}, token {at + 1}"
        )


def _check_wide(reference: ReferenceModel, llm: LLM, prompt: list[int]) -> None:
    params = greedy(3).model_copy(update={"prompt_logprobs": 5, "logprobs": ALL_LOGPROBS})
    for _ in range(2):  # the second time, the cache may have the prompt
        [output] = llm.generate([prompt], params)
        check_prompt_logprobs(reference, prompt, output.prompt_logprobs, 5)
        check_returned_logprobs(
            reference, prompt, output.outputs[0], llm.plan.model.info.num_token_ids
        )


def _check_entry(
    expected: np.ndarray, token_id: int, entries: dict[int, float], num_best: int, case: str
) -> None:
    assert token_id in entries, f"{case}: no entry for the sampled token"
    values = list(entries.values())
    assert values == sorted(values, reverse=True), (
        f"{case}: entries are not sorted from best to worst"
    )
    wrong = {t: v for t, v in entries.items() if abs(v - expected[t]) > TOLERANCE}
    assert not wrong, f"{case}: {wrong}, expected {[float(expected[t]) for t in wrong]}"
    assert len(entries) - num_best in (0, 1), f"{case}: {len(entries)} entries"
    best = np.sort(expected)[::-1][:num_best]
    assert np.abs(np.asarray(values[:num_best]) - best).max(initial=0.0) <= TOLERANCE, (
        f"{case}: the entries are not the best tokens"
    )
    if len(entries) > num_best:
        assert list(entries)[-1] == token_id, (
            f"{case}: an entry for a token that is neither sampled nor among the best"
        )


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return log_softmax over the last axis, f64 [..., vocab]."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    result: np.ndarray = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return result


def _check_refused(llm: LLM, prompt: list[int]) -> None:
    for num_best in (0, 3):
        try:
            llm.generate([prompt], asking(greedy(2), num_best))
        except RequestError:
            continue
        raise AssertionError(
            f"logprobs = {num_best} is accepted by an engine that declares no log-probabilities"
        )
