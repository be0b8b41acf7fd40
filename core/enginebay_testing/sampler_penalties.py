"""Checks of a sampler's penalties: alone, with other parameters, and beside rows
without penalties.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from enginebay_testing import sampling_oracle as oracle
from enginebay_testing.sampler_runs import (
    FEW_ROWS,
    LARGE,
    ROWS_PER_CALL,
    SMALL,
    RowHistory,
    SamplerRunner,
    check_alone_and_together,
    check_drawn_from,
    logits_of,
)
from enginebay_testing.sampling_oracle import OracleParams

PRESENCE = OracleParams(presence_penalty=1.5)
FREQUENCY = OracleParams(frequency_penalty=0.8)
REPETITION = OracleParams(repetition_penalty=1.7)
ENCOURAGED = OracleParams(presence_penalty=-1.0, frequency_penalty=-0.6, repetition_penalty=0.6)
ALL_THREE = OracleParams(presence_penalty=1.2, frequency_penalty=0.5, repetition_penalty=1.3)
PENALTIES = (PRESENCE, FREQUENCY, REPETITION, ENCOURAGED, ALL_THREE)

CASES = {
    "temperature": dataclasses.replace(ALL_THREE, temperature=0.7),
    "top_k": dataclasses.replace(PRESENCE, top_k=5),
    "top_p": dataclasses.replace(FREQUENCY, top_p=0.8),
    "min_p": dataclasses.replace(REPETITION, min_p=0.1),
    "all": dataclasses.replace(ENCOURAGED, temperature=0.9, top_k=30, top_p=0.9, min_p=0.02),
    "wide_both": dataclasses.replace(ALL_THREE, temperature=4.0, top_k=290, top_p=0.95),
}


def penalty_checks() -> list[tuple[str, Callable[[SamplerRunner], None]]]:
    """Return the checks of penalties; a greedy-only sampler has none."""
    return [
        ("penalised_greedy_rows_get_the_first_best", _greedy_rows_get_the_first_best),
        ("penalised_row_does_not_depend_on_the_batch", _row_does_not_depend_on_the_batch),
        ("tokens_of_minus_infinity_stay_out", _tokens_of_minus_infinity_stay_out),
        *(
            (
                f"penalised_support_and_frequencies[{name}]",
                functools.partial(_frequencies, params=params),
            )
            for name, params in CASES.items()
        ),
    ]


def history_of(logits: np.ndarray, seed: int) -> RowHistory:
    """Return tokens among the best ones of logits [vocab], so that penalties matter; some are in
    both prompt and output, some occur more than once.
    """
    rng = np.random.default_rng(seed)
    best = np.argsort(-logits)[:8]
    prompt, output = (rng.choice(best, n).tolist() for n in (1 + seed % 9, seed * 5 % 17))
    return RowHistory(prompt, [*output, *prompt[: seed % 3]])


def _greedy_rows_get_the_first_best(run: SamplerRunner) -> None:
    for vocab in (SMALL, LARGE):
        params = [
            dataclasses.replace(p, temperature=t, top_k=k)
            for p in PENALTIES
            for t, k in ((0.0, 0), (0.8, 1))
            for _ in range(3)
        ]
        logits = np.stack([logits_of(vocab, 1.0 + i % 3, i) for i in range(len(params))])
        histories = [RowHistory((), ()), *(history_of(row, i) for i, row in enumerate(logits[1:]))]
        tokens = _in_batches(run, logits, params, histories)
        scores = [
            oracle.penalised(row, p, *h)
            for row, p, h in zip(logits, params, histories, strict=True)
        ]
        moved = sum(int(s.argmax() != row.argmax()) for s, row in zip(scores, logits, strict=True))
        assert moved >= len(params) // 3, f"penalties change the best token of only {moved} rows"
        for row, (token, score) in enumerate(zip(tokens, scores, strict=True)):
            assert score.max() - score[token] < 1e-5, (
                f"{params[row]}, vocabulary {vocab}, {histories[row]}: "
                f"token {token} with score {score[token]}, "
                f"but the best is {score.argmax()} with {score.max()}"
            )


def _in_batches(
    run: SamplerRunner, logits: np.ndarray, params: list[OracleParams], histories: list[RowHistory]
) -> np.ndarray:
    """Return the tokens of the rows, FEW_ROWS at a time; the last batch overlaps the
    one before it.
    """
    num, tokens = len(params), np.zeros(len(params), np.int32)
    for start in range(0, num, FEW_ROWS):
        some = slice(max(0, min(start, num - FEW_ROWS)), min(start + FEW_ROWS, num))
        own = histories[some]
        positions = np.asarray([h.position for h in own])
        tokens[some] = run.rows(logits[some], params[some], np.arange(len(own)), positions, own)
    return tokens


def _row_does_not_depend_on_the_batch(run: SamplerRunner) -> None:
    for vocab in (SMALL, LARGE):
        greedy = [dataclasses.replace(p, temperature=0.0) for p in PENALTIES]
        plain = [
            OracleParams(temperature=0.0),
            OracleParams(),
            OracleParams(top_k=5),
            OracleParams(min_p=0.1),
            OracleParams(top_p=0.8),
        ]
        params = [*plain, *CASES.values(), *greedy]
        assert len(params) == FEW_ROWS
        logits = np.stack([logits_of(vocab, 1.0 + i % 3, i) for i in range(len(params))])
        check_alone_and_together(
            run, logits, params, [history_of(row, i) for i, row in enumerate(logits)]
        )


def _tokens_of_minus_infinity_stay_out(run: SamplerRunner) -> None:
    for vocab in (SMALL, LARGE):
        logits = logits_of(vocab)
        history = history_of(logits, 10)
        logits[list(history.output)] = -np.inf
        for penalties in PENALTIES:
            for temperature in (0.0, 3.0):
                params = dataclasses.replace(penalties, temperature=temperature)
                tokens = run.draws(logits, params, ROWS_PER_CALL, history)
                assert np.isfinite(logits[tokens]).all(), (
                    f"{params}: a token of logit -inf was chosen"
                )


def _frequencies(run: SamplerRunner, params: OracleParams) -> None:
    for row in (logits_of(SMALL), logits_of(LARGE)):
        history = history_of(row, 8)
        tokens = run.draws(row, params, history=history)
        check_drawn_from(oracle.penalised(row, params, *history), params, tokens)
