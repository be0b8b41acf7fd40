"""Conformance suite for any sampler: greedy equivalences, independence of rows, supports and frequencies."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.sampler import Sampler, SamplingState
from enginebay.testing import sampling_oracle as oracle
from enginebay.testing.sampling_oracle import Params

Check = tuple[str, Callable[[], None]]
"""A name and a function that raises AssertionError, with the case, when the promise is broken."""

NUM_DRAWS = 20480
ROWS_PER_CALL = 4096
SMALL, LARGE = 40, 320
"""Vocabularies. A sampler may look at the best tokens first: the large one is to be more than those."""

SLACK = 1e-6
"""Mass by which a border may be missed: sums in f32."""

CASES = {
    "temperature": Params(temperature=0.7),
    "hot": Params(temperature=2.5),
    "top_k": Params(top_k=5),
    "top_p": Params(top_p=0.8),
    "min_p": Params(min_p=0.1),
    "top_k_top_p": Params(temperature=1.3, top_k=20, top_p=0.7),
    "top_p_min_p": Params(top_p=0.95, min_p=0.05),
    "all": Params(temperature=0.9, top_k=30, top_p=0.9, min_p=0.02),
    "wide_top_k": Params(temperature=3.0, top_k=290),
    "wide_top_p": Params(temperature=4.0, top_p=0.9),
    "wide_both": Params(temperature=4.0, top_k=290, top_p=0.95),
}


def sampler_checks(sampler: Sampler, *, greedy_only: bool = False) -> list[Check]:
    """Every check that applies to `sampler`, a function by the protocol of enginebay.sampler.Sampler.

    A sampler that declares `greedy_only` is asked only what temperature 0 promises.
    """
    run = _Runner(sampler)
    checks = [
        ("result_is_int32_per_row", _result_is_int32_per_row),
        ("temperature_0_is_first_best", _temperature_0_is_first_best),
        ("greedy_rows_do_not_depend_on_the_batch", _greedy_rows_do_not_depend_on_the_batch),
    ]
    if not greedy_only:
        checks += [
            ("top_k_1_is_first_best", _top_k_1_is_first_best),
            ("greedy_row_among_sampled_rows_is_exact", _greedy_row_among_sampled_rows_is_exact),
            ("row_does_not_depend_on_the_batch", _row_does_not_depend_on_the_batch),
            ("equal_keys_and_positions_give_equal_tokens", _equal_keys_and_positions_give_equal_tokens),
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
    return [(name, functools.partial(check, run)) for name, check in checks]


class _Runner:
    """Calls the sampler inside jit with NumPy rows."""

    def __init__(self, sampler: Sampler) -> None:
        self._call = jax.jit(sampler)

    def rows(
        self, logits: np.ndarray, params: list[Params], seeds: np.ndarray, positions: np.ndarray
    ) -> np.ndarray:
        """logits f32 [S, vocab], S Params, seeds and positions int [S] -> int [S]."""
        keys = np.stack([np.full(len(seeds), 17), seeds], axis=1)
        columns = [
            np.asarray([getattr(p, name) for p in params])
            for name in ("temperature", "top_k", "top_p", "min_p")
        ]
        dtypes = (jnp.float32, jnp.int32, jnp.float32, jnp.float32)
        filled = [jnp.asarray(column, dtype) for column, dtype in zip(columns, dtypes, strict=True)]
        state = SamplingState(jnp.asarray(keys, jnp.uint32), jnp.asarray(positions, jnp.int32), *filled)
        return np.asarray(self._call(jnp.asarray(logits, jnp.float32), state))

    def draws(self, logits: np.ndarray, params: Params, num: int = NUM_DRAWS) -> np.ndarray:
        """`num` draws int [num] from logits [vocab]: one key, one position after the other."""
        rows = np.broadcast_to(logits, (ROWS_PER_CALL, logits.size))
        seeds = np.full(ROWS_PER_CALL, 5)
        starts = range(0, num, ROWS_PER_CALL)
        parts = [
            self.rows(rows, [params] * ROWS_PER_CALL, seeds, np.arange(s, s + ROWS_PER_CALL)) for s in starts
        ]
        return np.concatenate(parts)[:num]


def _logits(vocab: int, spread: float = 2.0, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=vocab) * spread).astype(np.float32)


def _mixed_batch(vocab: int) -> tuple[np.ndarray, list[Params]]:
    params = [
        Params(temperature=0.0),
        Params(),
        *CASES.values(),
        Params(top_p=0.3),
        Params(temperature=0.0, top_k=4),
    ]
    return np.stack([_logits(vocab, 1.0 + i % 3, i) for i in range(len(params))]), params


def _result_is_int32_per_row(run: _Runner) -> None:
    for rows, vocab in ((1, 1), (3, 2), (5, 300)):
        logits = np.stack([_logits(vocab, 1.0, i) for i in range(rows)])
        tokens = run.rows(logits, [Params(temperature=0.0)] * rows, np.arange(rows), np.arange(rows))
        got = (tokens.shape, str(tokens.dtype))
        assert got == ((rows,), "int32"), f"{rows} rows: got {tokens.dtype} {tokens.shape}"


def _temperature_0_is_first_best(run: _Runner) -> None:
    for vocab in (SMALL, LARGE):
        logits = np.round(np.stack([_logits(vocab, 1.0, i) for i in range(16)]))
        logits[0], logits[1, vocab // 2 :] = 3.0, -np.inf
        tokens = run.rows(logits, [Params(temperature=0.0)] * 16, np.arange(16), np.arange(16))
        _equal(
            tokens, oracle.first_best(logits), f"temperature 0, vocabulary {vocab}, with equal best scores"
        )


def _top_k_1_is_first_best(run: _Runner) -> None:
    for vocab in (SMALL, LARGE):
        logits = np.round(np.stack([_logits(vocab, 1.0, i) for i in range(16)]))
        params = [Params(temperature=0.1 + i, top_k=1, top_p=0.9 if i % 2 else 1.0) for i in range(16)]
        tokens = run.rows(logits, params, np.arange(16), np.arange(16))
        _equal(tokens, oracle.first_best(logits), f"top_k 1, vocabulary {vocab}, with equal best scores")


def _greedy_row_among_sampled_rows_is_exact(run: _Runner) -> None:
    logits, params = _mixed_batch(LARGE)
    tokens = run.rows(logits, params, np.arange(len(params)), np.arange(len(params)))
    greedy = np.asarray([p.temperature == 0.0 for p in params])
    _equal(tokens[greedy], oracle.first_best(logits)[greedy], "greedy rows of a mixed batch")


def _greedy_rows_do_not_depend_on_the_batch(run: _Runner) -> None:
    logits = np.stack([_logits(LARGE, 1.0, i) for i in range(9)])
    _same_alone_and_together(run, logits, [Params(temperature=0.0)] * 9)


def _row_does_not_depend_on_the_batch(run: _Runner) -> None:
    for vocab in (SMALL, LARGE):
        _same_alone_and_together(run, *_mixed_batch(vocab))


def _same_alone_and_together(run: _Runner, logits: np.ndarray, params: list[Params]) -> None:
    num = len(params)
    seeds, positions = np.arange(num) * 7, np.arange(num) * 3 + 1

    def of(order: np.ndarray) -> np.ndarray:
        return run.rows(logits[order], [params[i] for i in order], seeds[order], positions[order])

    together = of(np.arange(num))
    alone = np.concatenate([of(np.asarray([i])) for i in range(num)])
    _equal(alone, together, "each row alone against all in one batch")
    for seed in range(4):
        order = np.random.default_rng(seed).permutation(num)
        _equal(of(order), together[order], f"rows in the order {order}")
    for i in range(num):
        _equal(of(np.asarray([i, i])), together[[i, i]], f"row {i} ({params[i]}) beside itself")
        _equal(of(np.asarray([0, i])), together[[0, i]], f"row {i} ({params[i]}) beside a greedy row")


def _equal_keys_and_positions_give_equal_tokens(run: _Runner) -> None:
    logits = np.broadcast_to(_logits(LARGE), (64, LARGE))
    tokens = run.rows(logits, [Params(temperature=2.0)] * 64, np.full(64, 3), np.full(64, 11))
    _equal(tokens, np.full(64, tokens[0]), "64 rows of equal logits, key and position")


def _key_and_position_change_the_draw(run: _Runner) -> None:
    flat, same = np.zeros((64, LARGE), np.float32), np.full(64, 3)
    for what, seeds, positions in (("key", np.arange(64), same), ("position", same, np.arange(64))):
        tokens = run.rows(flat, [Params()] * 64, seeds, positions)
        assert len(set(tokens)) > 40, (
            f"64 draws of equal tokens, another {what} each: only {len(set(tokens))} differ"
        )


def _neighbouring_draws_are_independent(run: _Runner) -> None:
    logits = _logits(12, 1.0)
    shares = oracle.probabilities(logits, Params())
    expected = np.outer(shares, shares).ravel() * (ROWS_PER_CALL // 2)
    rows, params = np.broadcast_to(logits, (ROWS_PER_CALL, 12)), [Params()] * ROWS_PER_CALL
    same, rising = np.full(ROWS_PER_CALL, 9), np.arange(ROWS_PER_CALL)
    for what, seeds, positions in (("position", same, rising), ("key", rising, same)):
        tokens = run.rows(rows, params, seeds, positions)
        counts = np.bincount(tokens[0::2] * 12 + tokens[1::2], minlength=144)
        _fits(counts, expected, f"pairs of draws with neighbouring {what}s")


def _equals_of_the_kth_best_are_kept(run: _Runner) -> None:
    for vocab, equals in ((SMALL, 10), (LARGE, 280)):
        logits = np.full(vocab, -3.0, np.float32)
        logits[5 : 5 + equals] = 1.0
        logits[3] = 2.0
        _frequencies(run, Params(top_k=4), logits)


def _equals_at_the_top_p_border_are_counted(run: _Runner) -> None:
    for vocab, equals in ((SMALL, 10), (LARGE, 310)):
        logits = np.full(vocab, -8.0, np.float32)
        logits[-equals:] = 1.0
        _frequencies(run, Params(top_p=0.53), logits)
        _frequencies(run, Params(top_p=0.53, top_k=equals // 2), logits)


def _extreme_values(run: _Runner) -> None:
    for vocab in (SMALL, LARGE):
        logits = _logits(vocab, 2.0)
        logits[::2] = -np.inf
        for params in (
            Params(temperature=3.0),
            Params(top_p=0.9),
            Params(top_k=vocab - 1),
            Params(min_p=1e-6),
        ):
            tokens = run.draws(logits, params, ROWS_PER_CALL)
            assert np.isfinite(logits[tokens]).all(), f"{params}: a token of logit -inf was chosen"
        for scale, temperature in ((1e4, 1.0), (1.0, 1e-30), (1e30, 0.5)):
            tokens = run.draws(_logits(vocab) * np.float32(scale), Params(temperature=temperature), 64)
            _equal(
                tokens,
                np.full(64, _logits(vocab).argmax()),
                f"logits * {scale}, temperature {temperature}: one token has all mass",
            )
        for params in (Params(min_p=1.0), Params(top_p=1e-9)):
            tokens = run.draws(_logits(vocab), params, 64)
            _equal(tokens, np.full(64, _logits(vocab).argmax()), f"{params} keeps the best token only")


def _frequencies(run: _Runner, params: Params, logits: np.ndarray | None = None) -> None:
    """Support and chi-square of the draws; where `logits` is None for a small and for a larger vocabulary."""
    for row in [logits] if logits is not None else [_logits(SMALL), _logits(LARGE)]:
        tokens = run.draws(row, params)
        counts = np.bincount(tokens, minlength=row.size)
        case = f"{params}, vocabulary {row.size}"
        never = np.flatnonzero((counts > 0) & ~oracle.kept_tokens(row, params, SLACK))
        assert not never.size, f"{case}: tokens {never[:8]} were chosen, which the parameters drop"
        shares = oracle.probabilities(row, params)
        missed = np.flatnonzero(
            (counts == 0) & (shares * tokens.size > 40.0) & oracle.kept_tokens(row, params, -SLACK)
        )
        assert not missed.size, (
            f"{case}: tokens {missed[:8]} of probability {shares[missed[:8]]} were never chosen"
        )
        _fits(counts, shares * tokens.size, case)


def _fits(counts: np.ndarray, expected: np.ndarray, case: str) -> None:
    statistic, degrees = oracle.chi_square(counts, expected)
    limit = oracle.chi_square_limit(degrees)
    assert statistic <= limit, (
        f"{case}: chi-square {statistic:.1f} of {degrees} degrees of freedom, limit {limit:.1f}"
    )


def _equal(got: np.ndarray, wanted: np.ndarray, case: str) -> None:
    wrong = np.flatnonzero(got != wanted)
    assert not wrong.size, f"{case}: rows {wrong[:8]} got tokens {got[wrong[:8]]}, wanted {wanted[wrong[:8]]}"
