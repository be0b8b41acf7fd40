"""Draws of requests that ask for several things at once: logits processors and a sampler together,
against exact shares.

A stranger's processor is held to its source with the same function: give it among others, and what
each token's share must be.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from enginebay.processor import (
    IS_USED,
    Processors,
    RowFacts,
    Sizes,
    row_values,
)
from enginebay.sampler import Sampler, SamplingState
from enginebay_executor.processing import empty_rows, process
from enginebay_testing.sampler_runs import WIDTH, RowHistory, check_fits
from enginebay_testing.sampling_oracle import OracleParams, device_params

NUM_DRAWS = 200_000
ROWS_OF_EACH = 2000
"""Rows of each request in a call."""

ROWS_AT_ONCE = 500
"""Of those that use a processor: what a processor costs is what they cost."""

COMPILED = {"xla_backend_optimization_level": 1, "xla_llvm_disable_expensive_passes": True}
"""Quickly, as most of a short run is compiling, but not worst: many calls go through one program.
"""


@dataclasses.dataclass(frozen=True)
class Mix:
    """What a request asks for, and what must come of it.

    `logits` are f32 [vocab], the same number for all; `options` are those of its processors, by
    name; `shares` are float64 [vocab]: the exact probability of each token, 0.0 for one that must
    never come.
    """

    logits: np.ndarray
    shares: np.ndarray
    params: OracleParams = dataclasses.field(default_factory=OracleParams)
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    history: RowHistory = RowHistory((0,), ())  # noqa: RUF009  # a tuple
    eos_token_ids: tuple[int, ...] = ()


def check_mixed_draws(
    sampler: Sampler, processors: Processors, mixes: Mapping[str, Mix], num_draws: int = NUM_DRAWS
) -> None:
    """The mixes, rows of one batch, draw `num_draws` tokens each, and none draws them otherwise
    than its shares say.

    `processors` are applied in their order. AssertionError, with the mix's name, for a token that
    must never come, and for frequencies that chance makes of the shares less often than once in
    three million times.
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
            f"{name}: shares that sum up to {mix.shares.sum()}"
        )
        never = np.flatnonzero((seen > 0) & (mix.shares == 0.0))
        assert not never.size, f"{name}: tokens {never[:8]} were drawn, which must never come"
        check_fits(seen, mix.shares * num_draws, name)


class _Rows:
    """ROWS_OF_EACH rows of each mix, one mix after the other: what the step has of them, but for
    their keys.
    """

    def __init__(self, processors: Processors, mixes: list[Mix]) -> None:
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
        """The rows' state for the draws from number `start` on: each has a key of its own."""
        numbers = np.tile(start + np.arange(ROWS_OF_EACH), self._num_rows // ROWS_OF_EACH)
        keys = np.stack([np.full(self._num_rows, 23), numbers], axis=1)
        return dataclasses.replace(self._state, keys=jax.device_put(keys.astype(np.uint32)))


def _fields(
    processors: Processors, mixes: list[Mix], sizes: Sizes
) -> dict[str, dict[str, jax.Array]]:
    """Each processor's fields of all rows; those that do not use it have what rows begin with."""
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
    """[mixes, ...] as [mixes * ROWS_OF_EACH, ...]."""
    return jax.device_put(np.repeat(np.asarray(values, dtype), ROWS_OF_EACH, axis=0))
