"""Log-probabilities of an engine, held against log_softmax of a single forward pass over all
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from enginebay.errors import RequestError
from enginebay.llm import LLM
from enginebay.llm.abilities import Abilities
from enginebay.outputs import CompletionOutput
from enginebay.types import ALL_LOGPROBS, MAX_LOGPROBS, SamplingParams
from enginebay_testing.reference import ReferenceModel
from enginebay_testing.subject import LENGTHS, EngineSubject, greedy, penalised, prompts_of, seeded

TOLERANCE = 1e-4
"""How far an engine's log-probability may be from the reference's, in nats, in f32."""

ASKED = (None, 0, 5, None, MAX_LOGPROBS, 1)
"""What the rows of a batch ask for, by LENGTHS."""


def logprobs_are_the_models(subject: EngineSubject) -> None:
    """Rows that ask are told log_softmax of the model's own logits, alone and in a batch in which
    others do not ask.

    Their prompts are cut into chunks, and whatever chooses the tokens changes nothing of it. An
    engine that does not declare log-probabilities refuses them. One that declares
    full_vocab_logprobs tells those of prompts, which the cache may have, and of the whole
    vocabulary.
    """
    prompts = prompts_of(subject.vocab_size, LENGTHS, seed=13)
    kinds = (greedy, seeded, penalised)
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
            check_logprobs(subject.reference(), prompt, output.outputs[0], own.logprobs)


def asking(params: SamplingParams, num_best: int | None) -> SamplingParams:
    """The same parameters with log-probabilities."""
    return params.model_copy(update={"logprobs": num_best})


def check_logprobs(
    reference: ReferenceModel,
    prompt: Sequence[int],
    completion: CompletionOutput,
    num_best: int | None,
) -> None:
    """What a completion tells is what `num_best` asks for, and the reference's log_softmax within
    TOLERANCE.
    """
    told, token_ids = completion.logprobs, completion.token_ids
    case = f"a prompt of {len(prompt)} tokens, logprobs = {num_best}"
    if num_best is None:
        assert told is None, f"{case}: told without being asked"
        assert completion.cumulative_logprob is None, f"{case}: summed without being asked"
        return
    assert told is not None, f"{case}: nothing is told"
    assert len(told) == len(token_ids), f"{case}: {len(told)} entries for {len(token_ids)} tokens"
    expected = log_softmax(reference.logits([*prompt, *token_ids])[len(prompt) - 1 : -1])
    for at, (token_id, one) in enumerate(zip(token_ids, told, strict=True)):
        here = f"{case}, token {at}"
        _check_entry(expected[at], token_id, one, min(num_best, expected.shape[1]), here)
    total = sum(one[token_id] for one, token_id in zip(told, token_ids, strict=True))
    assert completion.cumulative_logprob is not None, f"{case}: no sum"
    assert abs(completion.cumulative_logprob - total) < 1e-9, f"{case}: the sum is another"


def check_prompt_logprobs(
    reference: ReferenceModel,
    prompt: Sequence[int],
    told: Sequence[dict[int, float] | None] | None,
    num_best: int,
) -> None:
    """Nothing of the first token, and of the others what `num_best` asks for, the reference's
    log_softmax within TOLERANCE.
    """
    case = f"a prompt of {len(prompt)} tokens, prompt_logprobs = {num_best}"
    assert told is not None, f"{case}: nothing is told"
    assert len(told) == len(prompt), f"{case}: {len(told)} entries"
    assert told[0] is None, f"{case}: the first token follows nothing"
    expected = log_softmax(reference.logits(prompt))
    for at, (token_id, one) in enumerate(zip(prompt[1:], told[1:], strict=True)):
        assert one is not None, f"{case}, token {at + 1}: nothing is told"
        _check_entry(
            expected[at], token_id, one, min(num_best, expected.shape[1]), f"{case}, token {at + 1}"
        )


def _check_wide(reference: ReferenceModel, llm: LLM, prompt: list[int]) -> None:
    params = greedy(3).model_copy(update={"prompt_logprobs": 5, "logprobs": ALL_LOGPROBS})
    for _ in range(2):  # the cache may have the prompt by then
        [output] = llm.generate([prompt], params)
        check_prompt_logprobs(reference, prompt, output.prompt_logprobs, 5)
        check_logprobs(reference, prompt, output.outputs[0], llm.plan.model.info.vocab_size)


def _check_entry(
    expected: np.ndarray, token_id: int, told: dict[int, float], num_best: int, case: str
) -> None:
    assert token_id in told, f"{case}: the sampled token is not told"
    values = list(told.values())
    assert values == sorted(values, reverse=True), f"{case}: not best first"
    wrong = {t: v for t, v in told.items() if abs(v - expected[t]) > TOLERANCE}
    assert not wrong, f"{case}: {wrong}, the reference has {[float(expected[t]) for t in wrong]}"
    assert len(told) - num_best in (0, 1), f"{case}: {len(told)} entries"
    best = np.sort(expected)[::-1][:num_best]
    assert np.abs(np.asarray(values[:num_best]) - best).max(initial=0.0) <= TOLERANCE, (
        f"{case}: not the best"
    )
    if len(told) > num_best:
        assert list(told)[-1] == token_id, (
            f"{case}: a token that is neither sampled nor among the best"
        )


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """f64 [..., vocab]."""
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
        raise AssertionError(f"logprobs = {num_best} is accepted by an engine that tells none")
