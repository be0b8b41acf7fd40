"""Conformance suite for any sampler: greedy results, penalties, independence of rows, supports and
frequencies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from enginebay.contracts.sampler import Sampler
from enginebay_testing import sampling_oracle as oracle
from enginebay_testing.sampler_penalties import penalty_checks
from enginebay_testing.sampler_runs import (
    FEW_ROWS,
    LARGE,
    ROWS_PER_CALL,
    SMALL,
    SamplerRunner,
    check_alone_and_together,
    check_drawn_from,
    check_equal,
    check_fits,
    logits_of,
)
from enginebay_testing.sampling_oracle import OracleParams
from enginebay_testing.verdicts import Check

CASES = {
    "temperature": OracleParams(temperature=0.7),
    "hot": OracleParams(temperature=2.5),
    "top_k": OracleParams(top_k=5),
    "top_k_2": OracleParams(top_k=2),
    "top_p": OracleParams(top_p=0.8),
    "min_p": OracleParams(min_p=0.1),
    "top_k_top_p": OracleParams(temperature=1.3, top_k=20, top_p=0.7),
    "top_p_min_p": OracleParams(top_p=0.95, min_p=0.05),
    "all": OracleParams(temperature=0.9, top_k=30, top_p=0.9, min_p=0.02),
    "wide_top_k": OracleParams(temperature=3.0, top_k=290),
    "wide_top_p": OracleParams(temperature=4.0, top_p=0.9),
    "wide_both": OracleParams(temperature=4.0, top_k=290, top_p=0.95),
}


def sampler_checks(sampler: Sampler, *, greedy_only: bool = False) -> list[Check]:
    """Return every check that applies to `sampler`, a function with the protocol of
    enginebay.contracts.sampler.Sampler.

    A sampler that declares `greedy_only` is only checked at temperature 0.
    """
    run = SamplerRunner(sampler)
    checks: list[tuple[str, Callable[[SamplerRunner], None]]] = [
        ("result_is_int32_per_row", _result_is_int32_per_row),
        ("temperature_0_is_first_best", _temperature_0_is_first_best),
        ("greedy_rows_do_not_depend_on_the_batch", _greedy_rows_do_not_depend_on_the_batch),
    ]
    if not greedy_only:
        checks += [
            ("top_k_1_is_first_best", _top_k_1_is_first_best),
            ("greedy_row_among_sampled_rows_is_exact", _greedy_row_among_sampled_rows_is_exact),
            ("row_does_not_depend_on_the_batch", _row_does_not_depend_on_the_batch),
            (
                "equal_keys_and_positions_give_equal_tokens",
                _equal_keys_and_positions_give_equal_tokens,
            ),
            ("key_and_position_change_the_draw", _key_and_position_change_the_draw),
            ("neighbouring_draws_are_independent", _neighbouring_draws_are_independent),
            ("equals_of_the_kth_best_are_kept", _equals_of_the_kth_best_are_kept),
            ("equals_at_the_top_p_border_are_counted", _equals_at_the_top_p_border_are_counted),
            ("extreme_values", _extreme_values),
        ]
        checks += [
            (f"support_and_frequencies[{name}]", functools.partial(_frequencies, params=p))
            for name, p in CASES.items()
        ]
        checks += penalty_checks()
    return [(name, functools.partial(check, run)) for name, check in checks]


def _mixed_batch(vocab: int) -> tuple[np.ndarray, list[OracleParams]]:
    params = [
        OracleParams(temperature=0.0),
        OracleParams(),
        *CASES.values(),
        OracleParams(top_p=0.3),
        OracleParams(temperature=0.0, top_k=4),
    ]
    assert len(params) == FEW_ROWS
    return np.stack([logits_of(vocab, 1.0 + i % 3, i) for i in range(len(params))]), params


def _result_is_int32_per_row(run: SamplerRunner) -> None:
    for rows, vocab in ((1, 1), (3, 2), (FEW_ROWS, LARGE)):
        logits = np.stack([logits_of(vocab, 1.0, i) for i in range(rows)])
        tokens = run.rows(
            logits, [OracleParams(temperature=0.0)] * rows, np.arange(rows), np.arange(rows)
        )
        got = (tokens.shape, str(tokens.dtype))
        assert got == ((rows,), "int32"), f"{rows} rows: got {tokens.dtype} {tokens.shape}"


def _temperature_0_is_first_best(run: SamplerRunner) -> None:
    for vocab in (SMALL, LARGE):
        logits = np.round(np.stack([logits_of(vocab, 1.0, i) for i in range(FEW_ROWS)]))
        logits[0], logits[1, vocab // 2 :] = 3.0, -np.inf
        tokens = run.rows(
            logits,
            [OracleParams(temperature=0.0)] * FEW_ROWS,
            np.arange(FEW_ROWS),
            np.arange(FEW_ROWS),
        )
        check_equal(
            tokens,
            oracle.first_best(logits),
            f"temperature 0, vocabulary {vocab}, with ties for the best score",
        )


def _top_k_1_is_first_best(run: SamplerRunner) -> None:
    for vocab in (SMALL, LARGE):
        logits = np.round(np.stack([logits_of(vocab, 1.0, i) for i in range(FEW_ROWS)]))
        params = [
            OracleParams(temperature=0.1 + i, top_k=1, top_p=0.9 if i % 2 else 1.0)
            for i in range(FEW_ROWS)
        ]
        tokens = run.rows(logits, params, np.arange(FEW_ROWS), np.arange(FEW_ROWS))
        check_equal(
            tokens,
            oracle.first_best(logits),
            f"top_k 1, vocabulary {vocab}, with ties for the best score",
        )


def _greedy_row_among_sampled_rows_is_exact(run: SamplerRunner) -> None:
    logits, params = _mixed_batch(LARGE)
    tokens = run.rows(logits, params, np.arange(len(params)), np.arange(len(params)))
    greedy = np.asarray([p.temperature == 0.0 for p in params])
    check_equal(tokens[greedy], oracle.first_best(logits)[greedy], "greedy rows of a mixed batch")


def _greedy_rows_do_not_depend_on_the_batch(run: SamplerRunner) -> None:
    logits = np.stack([logits_of(LARGE, 1.0, i) for i in range(FEW_ROWS)])
    check_alone_and_together(run, logits, [OracleParams(temperature=0.0)] * FEW_ROWS)


def _row_does_not_depend_on_the_batch(run: SamplerRunner) -> None:
    for vocab in (SMALL, LARGE):
        check_alone_and_together(run, *_mixed_batch(vocab))


def _equal_keys_and_positions_give_equal_tokens(run: SamplerRunner) -> None:
    num = ROWS_PER_CALL
    logits = np.broadcast_to(logits_of(LARGE), (num, LARGE))
    tokens = run.rows(
        logits, [OracleParams(temperature=2.0)] * num, np.full(num, 3), np.full(num, 11)
    )
    check_equal(tokens, np.full(num, tokens[0]), f"{num} rows of equal logits, key and position")


def _key_and_position_change_the_draw(run: SamplerRunner) -> None:
    num = ROWS_PER_CALL
    flat, same = np.zeros((num, LARGE), np.float32), np.full(num, 3)
    for what, seeds, positions in (
        ("key", np.arange(num), same),
        ("position", same, np.arange(num)),
    ):
        tokens = run.rows(flat, [OracleParams()] * num, seeds, positions)[:64]
        assert len(set(tokens)) > 40, (
            f"64 draws of equal logits, each with another {what}: only {len(set(tokens))} tokens"
        )


def _neighbouring_draws_are_independent(run: SamplerRunner) -> None:
    logits = np.full(SMALL, -np.inf, np.float32)
    logits[:12] = logits_of(12, 1.0)
    shares = oracle.probabilities(logits, OracleParams())[:12]
    expected = np.outer(shares, shares).ravel() * (ROWS_PER_CALL // 2)
    rows, params = np.broadcast_to(logits, (ROWS_PER_CALL, SMALL)), [OracleParams()] * ROWS_PER_CALL
    same, rising = np.full(ROWS_PER_CALL, 9), np.arange(ROWS_PER_CALL)
    for what, seeds, positions in (("position", same, rising), ("key", rising, same)):
        tokens = run.rows(rows, params, seeds, positions)
        assert tokens.max() < 12, f"token {tokens.max()} of logit -inf was chosen"
        counts = np.bincount(tokens[0::2] * 12 + tokens[1::2], minlength=144)
        check_fits(counts, expected, f"pairs of draws with neighbouring {what}s")


def _equals_of_the_kth_best_are_kept(run: SamplerRunner) -> None:
    for vocab, equals in ((SMALL, 10), (LARGE, 280)):
        logits = np.full(vocab, -3.0, np.float32)
        logits[5 : 5 + equals] = 1.0
        logits[3] = 2.0
        _frequencies(run, OracleParams(top_k=4), logits)


def _equals_at_the_top_p_border_are_counted(run: SamplerRunner) -> None:
    for vocab, equals in ((SMALL, 10), (LARGE, 310)):
        logits = np.full(vocab, -8.0, np.float32)
        logits[-equals:] = 1.0
        _frequencies(run, OracleParams(top_p=0.53), logits)
        _frequencies(run, OracleParams(top_p=0.53, top_k=equals // 2), logits)


def _extreme_values(run: SamplerRunner) -> None:
    for vocab in (SMALL, LARGE):
        logits = logits_of(vocab, 2.0)
        logits[::2] = -np.inf
        for params in (
            OracleParams(temperature=3.0),
            OracleParams(top_p=0.9),
            OracleParams(top_k=vocab - 1),
            OracleParams(min_p=1e-6),
        ):
            tokens = run.draws(logits, params, ROWS_PER_CALL)
            assert np.isfinite(logits[tokens]).all(), f"{params}: a token of logit -inf was chosen"
        for scale, temperature in ((1e4, 1.0), (1.0, 1e-30), (1e30, 0.5)):
            tokens = run.draws(
                logits_of(vocab) * np.float32(scale), OracleParams(temperature=temperature), 64
            )
            check_equal(
                tokens,
                np.full(64, logits_of(vocab).argmax()),
                f"logits * {scale}, temperature {temperature}: one token has all the mass",
            )
        for params in (OracleParams(min_p=1.0), OracleParams(top_p=1e-9)):
            tokens = run.draws(logits_of(vocab), params, 64)
            check_equal(
                tokens,
                np.full(64, logits_of(vocab).argmax()),
                f"{params} keeps the best token only",
            )


def _frequencies(
    run: SamplerRunner, params: OracleParams, logits: np.ndarray | None = None
) -> None:
    """Check support and chi-square of the draws; without `logits`, for a small and a larger
    vocabulary.
    """
    for row in [logits] if logits is not None else [logits_of(SMALL), logits_of(LARGE)]:
        check_drawn_from(row, params, run.draws(row, params))
