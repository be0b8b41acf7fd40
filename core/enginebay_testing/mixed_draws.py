"""Draws of requests that combine logits processors with a sampler, compared with exact shares.

Use `check_mixed_draws` to test a plugin's processor too: combine it with others, and pass the exact
share of each token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from enginebay.contracts.processor import (
    IS_USED,
    Processors,
    RowFacts,
    Sizes,
    row_values,
)
from enginebay.contracts.sampler import Sampler, SamplingState
from enginebay_runtime.processing import empty_rows, process
from enginebay_testing.sampler_runs import WIDTH, RowHistory, check_fits
from enginebay_testing.sampling_oracle import OracleParams, device_params

NUM_DRAWS = 200_000
ROWS_OF_EACH = 2000
"""Rows of each request in one call."""

ROWS_AT_ONCE = 500
"""Rows at once that pass through the processors."""

COMPILED = {"xla_backend_optimization_level": 1, "xla_llvm_disable_expensive_passes": True}
"""Quick compilation, because compiling takes most of a short run, but with some optimisation,
because many calls run one program.
"""


@dataclasses.dataclass(frozen=True)
class MixedRequest:
    """A request and the shares that its draws must have.

    `logits` are f32 [vocab]; all mixes have the same vocab. `options` are the options of its
    processors, by name. `shares` are float64 [vocab]: the exact probability of each token, 0.0 for
    a token that must never be drawn.
    """

    logits: np.ndarray
    shares: np.ndarray
    params: OracleParams = dataclasses.field(default_factory=OracleParams)
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    history: RowHistory = RowHistory((0,), ())  # noqa: RUF009  # a tuple
    eos_token_ids: tuple[int, ...] = ()


def check_mixed_draws(
    sampler: Sampler,
    processors: Processors,
    mixes: Mapping[str, MixedRequest],
    num_draws: int = NUM_DRAWS,
) -> None:
    """Draw `num_draws` tokens for each mix, as rows of one batch, and compare them with its shares.

    `processors` are applied in their order. Raises AssertionError, with the name of the mix, for a
    token that must never be drawn, and for frequencies that chance would produce less than once in
    three million runs.
    """
    rows = _Rows(processors, list(mixes.values()))
    draw = jax.jit(
        lambda logits, own, state: sampler(
            process(processors, logits, own, state, rows_at_once=ROWS_AT_ONCE)[0], state
        ),
        compiler_options=COMPILED,
    )
    vocab = rows.logits.shape[1]
    counts = np.zeros((len(mixes), vocab), np.int64)
    for start in range(0, num_draws, ROWS_OF_EACH):
        tokens = np.asarray(draw(rows.logits, rows.own, rows.state(start))).reshape(len(mixes), -1)
        for row, drawn in enumerate(tokens[:, : num_draws - start]):
            counts[row] += np.bincount(drawn, minlength=vocab)
    for (name, mix), seen in zip(mixes.items(), counts, strict=True):
        assert abs(mix.shares.sum() - 1.0) < 1e-9, (
            f"{name}: the shares sum to {mix.shares.sum()}, expected 1"
        )
        never = np.flatnonzero((seen > 0) & (mix.shares == 0.0))
        assert not never.size, f"{name}: tokens {never[:8]} were drawn, but their share is 0"
        check_fits(seen, mix.shares * num_draws, name)


class _Rows:
    """ROWS_OF_EACH rows per mix, mix after mix, with all inputs of the step except their keys."""

    def __init__(self, processors: Processors, mixes: list[MixedRequest]) -> None:
        self.logits = _of_each([mix.logits for mix in mixes], np.float32)
        self.own = _fields(processors, mixes, Sizes(self.logits.shape[1], WIDTH))
        tokens = np.zeros((len(mixes), WIDTH), np.int32)
        for row, mix in enumerate(mixes):
            tokens[row, : mix.history.position] = [*mix.history.prompt, *mix.history.output]
        params = device_params([mix.params for mix in mixes])
        self._num_rows = len(mixes) * ROWS_OF_EACH
        self._state = SamplingState(
            keys=jax.device_put(np.zeros((self._num_rows, 2), np.uint32)),
            positions=_of_each([mix.history.position for mix in mixes], np.int32),
            token_ids=_of_each(tokens, np.int32),
            prompt_lengths=_of_each([len(mix.history.prompt) for mix in mixes], np.int32),
            params=jax.tree.map(lambda one: _of_each(one, one.dtype), params),
        )

    def state(self, start: int) -> SamplingState:
        """Return the state of the rows for the draws from number `start` on; each draw has its own
        key.
        """
        numbers = np.tile(start + np.arange(ROWS_OF_EACH), self._num_rows // ROWS_OF_EACH)
        keys = np.stack([np.full(self._num_rows, 23), numbers], axis=1)
        return dataclasses.replace(self._state, keys=jax.device_put(keys.astype(np.uint32)))


def _fields(
    processors: Processors, mixes: list[MixedRequest], sizes: Sizes
) -> dict[str, dict[str, jax.Array]]:
    """Return the fields of each processor for all rows; a row that does not use it has initial
    values.
    """
    own = {
        n: {f: np.asarray(v).copy() for f, v in fields.items()}
        for n, fields in empty_rows(processors, len(mixes), sizes).items()
    }
    for name, processor in processors:
        for row, mix in enumerate(mixes):
            if name not in mix.options:
                continue
            facts = RowFacts(np.asarray(mix.history.prompt, np.int32), mix.eos_token_ids, sizes)
            own[name][IS_USED][row] = True
            for field, value in row_values(
                name, processor, mix.options[name], facts
            ).values.items():
                own[name][field][row] = value
    return {n: {f: _of_each(v, v.dtype) for f, v in fields.items()} for n, fields in own.items()}


def _of_each(values: Any, dtype: Any) -> jax.Array:
    """Repeat [mixes, ...] to [mixes * ROWS_OF_EACH, ...]."""
    return jax.device_put(np.repeat(np.asarray(values, dtype), ROWS_OF_EACH, axis=0))
