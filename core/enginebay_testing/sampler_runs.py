"""Shared by the checks of samplers: running rows through a sampler, and comparing tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from enginebay.compose.candidates import candidates, interpreted_names
from enginebay.compose.kernels import wanted_kernel
from enginebay.config import EngineConfig, Reason
from enginebay.contracts.sampler import DeviceParams, Sampler, SamplingState
from enginebay.ops.caps import Env
from enginebay.ops.select import Candidate, choose
from enginebay.plugins.registry import Registry
from enginebay_testing import sampling_oracle as oracle
from enginebay_testing.oracle import f32_sum_error
from enginebay_testing.sampling_oracle import OracleParams, device_params

NUM_DRAWS = 20480
ROWS_PER_CALL = 4096
FEW_ROWS = 16
"""Number of rows in a batch of different rows."""

SMALL, LARGE = 40, 320
"""Vocabulary sizes. The large one is for samplers that look at a limited number of best tokens
first.
"""

WIDTH = 32
"""Columns of token_ids; a sampler must not read columns after a row's position."""

COMPILED_WELL = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
"""Default optimisation of XLA, whatever XLA_FLAGS says: many rows run through few programs."""


class RowHistory(NamedTuple):
    """The tokens of a row before the token to be chosen."""

    prompt: Sequence[int]
    output: Sequence[int]

    @property
    def position(self) -> int:
        """Return the position of the token to be chosen."""
        return len(self.prompt) + len(self.output)


class SamplerRunner:
    """Calls the sampler inside jit with NumPy rows. Each shape is compiled once, so checks should
    share shapes.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._call = jax.jit(sampler)
        self._call_many = jax.jit(sampler, compiler_options=COMPILED_WELL)

    def rows(
        self,
        logits: np.ndarray,
        params: list[OracleParams],
        seeds: np.ndarray,
        positions: np.ndarray,
        histories: Sequence[RowHistory] = (),
    ) -> np.ndarray:
        """Return the token that the sampler chooses for each row, int [S]. `logits` are f32
        [S, vocab]; there are S `params`; `seeds` and `positions` are int [S].

        Without `histories`, the earlier tokens of the rows are arbitrary. With them, positions[i]
        must be histories[i].position.
        """
        num_rows, vocab = logits.shape
        texts = _texts(num_rows, vocab, positions, histories)
        return self._tokens(logits, device_params(params), seeds, positions, texts)

    def draws(
        self,
        logits: np.ndarray,
        params: OracleParams,
        num: int = NUM_DRAWS,
        history: RowHistory | None = None,
    ) -> np.ndarray:
        """Draw `num` tokens, int [num], from logits [vocab]: one key at successive positions.

        With a history: at its position, with successive keys.
        """
        size = ROWS_PER_CALL
        rows, columns = np.broadcast_to(logits, (size, logits.size)), device_params([params] * size)
        same, position = np.full(size, 5), None if history is None else np.full(1, history.position)
        parts = []
        for start in range(0, num, size):
            rising = np.arange(start, start + size)
            if history is None or position is None:
                texts = _texts(size, logits.size, rising)
                parts.append(self._tokens(rows, columns, same, rising, texts))
            else:
                tokens, prompt_lengths = _texts(1, logits.size, position, [history])
                texts = np.repeat(tokens, size, 0), np.repeat(prompt_lengths, size)
                parts.append(self._tokens(rows, columns, rising, np.repeat(position, size), texts))
        return np.concatenate(parts)[:num]

    def _tokens(
        self,
        logits: np.ndarray,
        params: DeviceParams,
        seeds: np.ndarray,
        positions: np.ndarray,
        texts: tuple[np.ndarray, np.ndarray],
    ) -> np.ndarray:
        # NumPy arrays, because jit takes them without compiling a program.
        fields: dict[str, Any] = {
            "params": params,
            "keys": np.stack([np.full(len(seeds), 17), seeds], axis=1).astype(np.uint32),
            "positions": positions.astype(np.int32),
            "token_ids": texts[0],
            "prompt_lengths": texts[1],
        }
        call = self._call_many if len(logits) == ROWS_PER_CALL else self._call
        return np.asarray(call(logits.astype(np.float32), SamplingState(**fields)))


def _texts(
    num_rows: int, vocab: int, positions: np.ndarray, histories: Sequence[RowHistory] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows' tokens int32 [S, WIDTH] and prompt lengths int32 [S]."""
    tokens = np.tile(np.arange(WIDTH, dtype=np.int32) % vocab, (num_rows, 1))
    prompt_lengths = np.minimum(positions, WIDTH // 2).astype(np.int32)
    for row, history in enumerate(histories):
        tokens[row, : history.position] = [*history.prompt, *history.output]
        prompt_lengths[row] = len(history.prompt)
    return tokens, prompt_lengths


def logits_of(vocab: int, spread: float = 2.0, seed: int = 0) -> np.ndarray:
    """Return random logits f32 [vocab]."""
    return (np.random.default_rng(seed).normal(size=vocab) * spread).astype(np.float32)


def check_alone_and_together(
    run: SamplerRunner,
    logits: np.ndarray,
    params: list[OracleParams],
    histories: Sequence[RowHistory] = (),
) -> None:
    """Check that a row's token is the same alone, in any order, beside itself and beside row 0."""
    num = len(params)
    own_positions = [h.position for h in histories] or range(1, 3 * num, 3)
    seeds, positions = np.arange(num) * 7, np.asarray(own_positions)

    def of(order: np.ndarray) -> np.ndarray:
        own = [histories[i] for i in order] if histories else ()
        return run.rows(
            logits[order], [params[i] for i in order], seeds[order], positions[order], own
        )

    together = of(np.arange(num))
    alone = np.concatenate([of(np.asarray([i])) for i in range(num)])
    check_equal(alone, together, "each row alone against all in one batch")
    for seed in range(4):
        order = np.random.default_rng(seed).permutation(num)
        check_equal(of(order), together[order], f"rows in the order {order}")
    for i in range(num):
        check_equal(
            of(np.asarray([i, i])), together[[i, i]], f"row {i} ({params[i]}) beside itself"
        )
        check_equal(
            of(np.asarray([0, i])), together[[0, i]], f"row {i} ({params[i]}) beside a greedy row"
        )


def check_drawn_from(scores: np.ndarray, params: OracleParams, tokens: np.ndarray) -> None:
    """Check that `tokens` are a sample of what `params` keep of the penalized scores [vocab]."""
    counts = np.bincount(tokens, minlength=scores.size)
    case = f"{params}, vocabulary {scores.size}"
    slack = f32_sum_error(scores.size)
    never = np.flatnonzero((counts > 0) & ~oracle.kept_tokens(scores, params, slack))
    assert not never.size, (
        f"{case}: tokens {never[:8]} were chosen, but the parameters exclude them"
    )
    shares = oracle.probabilities(scores, params)
    missed = np.flatnonzero(
        (counts == 0) & (shares * tokens.size > 40.0) & oracle.kept_tokens(scores, params, -slack)
    )
    assert not missed.size, (
        f"{case}: tokens {missed[:8]} of probability {shares[missed[:8]]} were never chosen"
    )
    check_fits(counts, shares * tokens.size, case)


def check_fits(counts: np.ndarray, expected: np.ndarray, case: str) -> None:
    """Check by chi-square that the counts fit the expected counts."""
    statistic, degrees = oracle.chi_square(counts, expected)
    limit = oracle.chi_square_limit(degrees)
    assert statistic <= limit, (
        f"{case}: chi-square {statistic:.1f} of {degrees} degrees of freedom, limit {limit:.1f}"
    )


def check_equal(got: np.ndarray, wanted: np.ndarray, case: str) -> None:
    """Check that tokens are equal, row by row."""
    wrong = np.flatnonzero(got != wanted)
    assert not wrong.size, (
        f"{case}: rows {wrong[:8]} got tokens {got[wrong[:8]]}, expected {wanted[wrong[:8]]}"
    )


def choose_plain(
    registry: Registry, config: EngineConfig, env: Env, op: str
) -> tuple[Candidate, Reason]:
    """Choose an implementation of an op without phases, alone, as a plan chooses it."""
    wanted = wanted_kernel(config, op)
    able = candidates(registry, op, env, interpret=interpreted_names(config, wanted))
    return choose(f"kernels.{op}", wanted, able)
