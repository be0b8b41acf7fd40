"""Checks of the op sample. NumPy in float64 finds the kept tokens and their scores, and the drawn
ids must agree.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, cast

import jax
import numpy as np

from enginebay.ops import sampling
from enginebay.ops.sample import SampleOp
from enginebay_testing.case_runs import taken
from enginebay_testing.covering import Combination
from enginebay_testing.op_kit import PlainCase
from enginebay_testing.oracle import f32_sum_error
from enginebay_testing.sampling_oracle import OracleParams, kept_tokens
from enginebay_testing.verdicts import Check, expect

VOCABS = (40, 700)
"""Sizes of the vocabulary. They are no multiples of a tile, and the large one is more than the best
few that an implementation may sort.
"""

NUM_ROWS = 16

NUM_TRIED, NUM_AIMED = 64, 4096
"""Seeds that are tried for each row: of NUM_AIMED seeds, those with the most noise for the token at
the border.
"""

SCORE_BOUND = 1e-5
"""Error of a score per unit of 1 + |score|: the rounding of its sum and of two logarithms, which
may be those of a device.
"""


@dataclasses.dataclass(frozen=True)
class SampleCase:
    """Rows of one vocabulary: z f32 [S, vocab], and one OracleParams per row."""

    name: str
    z: np.ndarray
    params: tuple[OracleParams, ...]


def sample_checks(op: SampleOp) -> list[Check]:
    """Return every check of an implementation; rows of one vocabulary share a compiled program."""
    call = jax.jit(op)
    cases = [case for vocab in VOCABS for case in vocabulary_cases(vocab)]
    checks: list[Check] = [
        (f"sample[{c.name}]", functools.partial(check_sample, call, c, seed))
        for seed, c in enumerate(cases)
    ]
    return [
        *checks,
        ("sample[rows_are_independent]", functools.partial(_rows_are_independent, call)),
    ]


def vocabulary_cases(vocab: int) -> list[SampleCase]:
    """Return the cases of one vocabulary, with NUM_ROWS rows each."""
    wide = vocab * 7 // 8
    kinds = {
        "everything": (OracleParams(), OracleParams(min_p=0.1)),
        "top_k": (
            OracleParams(top_k=5),
            OracleParams(top_k=1),
            OracleParams(top_k=wide),
            OracleParams(top_k=vocab - 1),
        ),
        "top_p": (
            OracleParams(top_p=0.8),
            OracleParams(top_p=0.3),
            OracleParams(top_p=0.999),
            OracleParams(top_p=1e-9),
        ),
        "together": (
            OracleParams(top_k=20, top_p=0.7),
            OracleParams(top_k=wide, top_p=0.95),
            OracleParams(top_k=30, top_p=0.9, min_p=0.02),
            OracleParams(top_k=vocab - 2, min_p=1.0),
        ),
    }
    rng = np.random.default_rng(vocab)
    spread = np.tile([3.0, 1.0, 0.25, 8.0], NUM_ROWS // 4)[:, None]
    cases = []
    for name, params in kinds.items():
        logits = rng.normal(size=(NUM_ROWS, vocab)) * spread
        logits[1::5, ::2] = -np.inf
        every = tuple(params[(row // 4) % len(params)] for row in range(NUM_ROWS))
        cases.append(SampleCase(f"{name}-{vocab}", _shifted(logits), every))
    # Few different values, as from a model in bf16, so that every border has equal tokens.
    equal = np.round(rng.normal(size=(NUM_ROWS, vocab)) * 2.0) / 2.0
    mixed = tuple(p for params in kinds.values() for p in params)
    cases.append(SampleCase(f"equals-{vocab}", _shifted(equal), (mixed * 2)[:NUM_ROWS]))
    return cases


def _shifted(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float32)
    return logits - logits.max(axis=1, keepdims=True)


def check_sample(
    op: SampleOp, case: SampleCase, seed: int = 0, seeds: np.ndarray | None = None
) -> None:
    """Raise AssertionError unless each token is kept and has the best score of the kept ones."""
    seeds = telling_seeds(case, seed) if seeds is None else seeds
    tokens = _run(op, case, seeds)
    wanted = (len(case.params),)
    expect((tokens.shape, str(tokens.dtype)) == (wanted, "int32"), f"{tokens.shape} {tokens.dtype}")
    scores = case.z.astype(np.float64) + gumbel_noise(seeds, np.arange(case.z.shape[1]))
    for row, (token, params) in enumerate(zip(tokens, case.params, strict=True)):
        what = f"{case.name}, row {row} ({params}): token {token}"
        expect(0 <= token < case.z.shape[1], f"{what} is not in the vocabulary")
        if params.top_k == 1:
            best = int(np.argmax(case.z[row]))
            expect(token == best, f"{what}, the first best is {best}")
            continue
        slack = f32_sum_error(case.z.shape[1])  # of the masses before a token
        expect(_kept(case.z[row], params, slack)[token], f"{what} is not kept")
        rivals = np.where(_kept(case.z[row], params, -slack), scores[row], -np.inf)
        rival = int(np.argmax(rivals))
        behind = rivals[rival] - scores[row, token]
        allowed = SCORE_BOUND * (1.0 + abs(rivals[rival]))
        expect(
            behind <= allowed,
            f"{what} scores {behind:.3g} less than {rival}, allowed {allowed:.3g}",
        )


def _kept(z: np.ndarray, params: OracleParams, slack: float = 0.0) -> np.ndarray:
    """Return kept_tokens without slack for top_k and for min_p = 1.

    z [vocab] is given exactly, so the k-th best token and the tokens equal to the best one do not
    depend on rounding.
    """
    if 0 < params.top_k < z.size:
        z = np.where(z >= np.sort(z)[-params.top_k], z, -np.inf)
    if params.min_p == 1.0:
        best = z == z.max()
        return best & kept_tokens(z, dataclasses.replace(params, top_k=0, min_p=0.0), slack)
    return kept_tokens(z, dataclasses.replace(params, top_k=0), slack)


def telling_seeds(case: SampleCase, seed: int) -> np.ndarray:
    """Return seeds uint32 [S, 2] whose draws are nearest to a border of the kept tokens.

    In one row the last kept token wins; in the next row the first dropped one would win. Rows of
    every spread of logits are of both kinds.
    """
    rng = np.random.default_rng(seed)
    chosen = rng.integers(0, 2**32, (len(case.params), 2), dtype=np.uint32)
    for row, params in enumerate(case.params):
        z, kept = case.z[row], _kept(case.z[row], params)
        order = np.argsort(-z, kind="stable")
        rank = np.empty(kept.size, int)
        rank[order] = np.arange(kept.size)
        aimed = rng.integers(0, 2**32, (NUM_AIMED, 2), dtype=np.uint32)
        others = _differing(z, params, kept)
        aim = (row + row // 4 + seed) % (2 + len(others))
        if aim >= 2:
            chosen[row] = _winning_seed(aimed, z, *others[aim - 2])
            continue
        of_kept = aim == 1
        border = order[kept[order]][-1:] if of_kept else order[~kept[order]][:1]
        # where all tokens are kept, no token is aimed at
        noise = gumbel_noise(aimed, border).sum(axis=1)
        tried = aimed[np.argsort(noise, kind="stable")[-NUM_TRIED:]]
        scores = z + gumbel_noise(tried, np.arange(kept.size))
        deepest = rank[np.argmax(np.where(kept, scores, -np.inf), axis=1)]
        anywhere = np.argmax(scores, axis=1)
        shallowest = np.where(kept[anywhere], kept.size, rank[anywhere])
        chosen[row] = tried[np.argmax(deepest) if of_kept else np.argmin(shallowest)]
    return chosen


def _differing(
    z: np.ndarray, params: OracleParams, kept: np.ndarray
) -> list[tuple[int, np.ndarray]]:
    """Return for each other order of the filters that keeps other tokens: the best token that only
    one of the two orders keeps, and which tokens one of them keeps.
    """
    found = []
    for other in (_min_p_first(z, params), _top_p_first(z, params)):
        differs = np.flatnonzero(other != kept)
        if differs.size:
            found.append((int(differs[np.argmax(z[differs])]), kept | other))
    return found


def _min_p_first(z: np.ndarray, params: OracleParams) -> np.ndarray:
    """Return what is kept where top_p is a share of the mass that min_p leaves."""
    left = _kept(z, dataclasses.replace(params, top_p=1.0))
    return _kept(np.where(left, z, -np.inf), dataclasses.replace(params, min_p=0.0))


def _top_p_first(z: np.ndarray, params: OracleParams) -> np.ndarray:
    """Return what is kept where top_p is a share of the mass of all tokens."""
    of_all = _kept(z, dataclasses.replace(params, top_k=0))
    return of_all & _kept(z, dataclasses.replace(params, top_p=1.0))


def _winning_seed(aimed: np.ndarray, z: np.ndarray, token: int, able: np.ndarray) -> np.ndarray:
    """Return the seed with which a token is the furthest ahead of the others of a set."""
    ids = np.flatnonzero(able)
    noise = gumbel_noise(aimed, np.array([token]))[:, 0]
    tried = aimed[np.argsort(noise, kind="stable")[-NUM_TRIED:]]
    scores = z[ids] + gumbel_noise(tried, ids)
    mine = ids == token
    ahead = scores[:, mine][:, 0] - scores[:, ~mine].max(axis=1, initial=-np.inf)
    return np.asarray(tried[np.argmax(ahead)])


def _rows_are_independent(op: SampleOp) -> None:
    """Check that a row's token does not depend on the other rows."""
    case = vocabulary_cases(VOCABS[1])[3]
    seeds = np.random.default_rng(0).integers(0, 2**32, (NUM_ROWS, 2), dtype=np.uint32)
    together = _run(op, case, seeds)
    for row in range(0, NUM_ROWS, 3):
        alone = [row] * NUM_ROWS
        easy = dataclasses.replace(case, z=case.z[alone], params=(case.params[row],) * NUM_ROWS)
        got = _run(op, easy, seeds[alone])
        expect(
            (got == together[row]).all(),
            f"row {row}: token {together[row]} with other rows, {got} with copies of itself",
        )


def _run(op: SampleOp, case: SampleCase, seeds: np.ndarray) -> np.ndarray:
    vocab = case.z.shape[1]
    columns = {
        "top_k": np.asarray([p.top_k or vocab for p in case.params], np.int32),
        "top_p": np.asarray([p.top_p for p in case.params], np.float32),
        "min_p": np.asarray([p.min_p for p in case.params], np.float32),
    }
    z, numbers, columns = jax.device_put((case.z, seeds, columns))
    return np.asarray(taken(op(z, numbers, **columns), (z, numbers, columns)))


def gumbel_noise(seeds: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Compute enginebay.ops.sampling.gumbel_noise in NumPy: float64 [S, n].

    seeds is uint32 [S, 2], ids int [n]. The uniform numbers are f32, as in the contract; the
    logarithms are exact.
    """
    mixed = (ids.astype(np.uint64) * sampling.SPREAD + seeds[:, :1]).astype(np.uint32)
    bits = _mix(_mix(mixed) ^ seeds[:, 1:])
    uniform = (bits >> np.uint32(1)).astype(np.float32) * np.float32(2.0**-31) + np.float32(
        2.0**-32
    )
    exact = np.minimum(uniform, np.float32(1.0 - 2.0**-24)).astype(np.float64)
    return np.asarray(-np.log(-np.log1p(-exact)))


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(sampling.FACTORS[0])
    x = (x ^ (x >> np.uint32(15))) * np.uint32(sampling.FACTORS[1])
    return np.asarray(x ^ (x >> np.uint32(16)))


TOP_K = {"all": 0, "few": 5, "one": 1}
TOP_P = {"all": 1.0, "most": 0.95, "some": 0.6, "least": 1e-9}
MIN_P = {"none": 0.0, "some": 0.05, "one": 1.0}


def _jitted(op: SampleOp) -> SampleOp:
    """Return a program that all cases with equal shapes share, if the kernel can be a key."""
    try:
        hash(op)
    except TypeError:
        return jax.jit(op)
    return _shared(op)


_shared: Any = functools.lru_cache(maxsize=4)(jax.jit)


def check_sample_case(op: SampleOp, given: PlainCase) -> None:
    """Run `check_sample` for a case, and check that a repeated step gives the same tokens.

    Every second row keeps all tokens, so that rows need different computations.
    """
    case = _case_of(given.row, given.seed)
    call = _jitted(op)
    seeds = telling_seeds(case, given.seed)
    _run(call, dataclasses.replace(case, z=case.z[:, ::-1]), seeds[::-1])
    check_sample(call, case, given.seed, seeds)
    first = _run(call, case, seeds).tobytes()
    for turn in range(1, given.repeats):
        expect(
            _run(call, case, seeds).tobytes() == first,
            f"run {turn + 1} of the same step gives other tokens",
        )


def _case_of(row: Combination, seed: int) -> SampleCase:
    vocab, rows = int(cast("int", row["vocab"])), int(cast("int", row["rows"]))
    top_k = {**TOP_K, "most": max(1, vocab * 7 // 8), "all_but_one": vocab - 1}[str(row["top_k"])]
    asked = OracleParams(
        top_k=min(top_k, vocab), top_p=TOP_P[str(row["top_p"])], min_p=MIN_P[str(row["min_p"])]
    )
    params = tuple(OracleParams() if i % 4 == 3 else asked for i in range(rows))
    return SampleCase(
        "-".join(f"{axis}_{v}" for axis, v in row.items()),
        _logits_of(row, vocab, rows, seed),
        params,
    )


def _logits_of(row: Combination, vocab: int, rows: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng([seed, vocab])
    logits = rng.normal(size=(rows, vocab)) * np.tile([3.0, 1.0, 0.25, 8.0], rows)[:rows, None]
    kind = row["logits"]
    if kind == "flat":
        logits *= 1e-3
    elif kind == "peaked":
        logits[np.arange(rows), rng.integers(0, vocab, rows)] += 60.0
    elif kind == "equals":
        logits = np.round(logits * 2.0) / 2.0
    elif kind in ("best_last", "best_first"):
        at = -1 if kind == "best_last" else 0
        logits[:, at] = logits.max(axis=1) + 1.0
    elif kind == "one_finite":
        only = rng.integers(0, vocab, rows)
        best = logits[np.arange(rows), only]
        logits[:] = -np.inf
        logits[np.arange(rows), only] = best
    elif kind == "late":
        logits[:, -(vocab // 8) :] += 40.0
    elif kind == "two_values":
        logits = np.sign(logits)
    elif kind == "holes":
        logits[:, rng.permutation(vocab)[: vocab // 2]] = -np.inf
    return _shifted(logits)
