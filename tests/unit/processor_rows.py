"""Rows for tests of the built-in logits processors: each processor is compiled once, with its cases
as rows of one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from enginebay.contracts.processor import IS_USED, LogitsProcessor, RowFacts, Sizes, row_values
from enginebay.contracts.sampler import SamplingState
from enginebay.plugins.registry import load_registry
from enginebay_testing.sampling_oracle import OracleParams, device_params

VOCAB, WIDTH = 70, 48
SIZES = Sizes(VOCAB, WIDTH)
REGISTRY = load_registry()
EOS = (4, 9)


class Row:
    """A case: options, logits [VOCAB], prompt and output, temperature, and its own key."""

    def __init__(
        self,
        options: Mapping[str, Any] | None = None,
        prompt: Sequence[int] = (3, 1),
        output: Sequence[int] = (),
        temperature: float = 1.0,
        logits: np.ndarray | None = None,
        seed: int = 0,
    ) -> None:
        self.options = options
        self.prompt, self.output = list(prompt), list(output)
        self.temperature, self.seed = temperature, seed
        own = np.random.default_rng(seed).normal(size=VOCAB) * 2.0
        self.logits = (own if logits is None else logits).astype(np.float32)

    @property
    def text(self) -> list[int]:
        return self.prompt + self.output

    @property
    def p(self) -> np.ndarray:
        z = self.logits.astype(np.float64) / np.float64(np.float32(self.temperature or 1.0))
        mass = np.exp(z - z.max())
        return mass / mass.sum()

    def __repr__(self) -> str:
        return (
            f"{self.options}, text {self.prompt} + {self.output}, T {self.temperature}, "
            f"seed {self.seed}"
        )


def processor_of(name: str) -> LogitsProcessor:
    made = REGISTRY.load(REGISTRY.find("processor", name))()
    assert isinstance(made, LogitsProcessor)
    return made


def fields_of(
    name: str, options: Mapping[str, Any], prompt: Sequence[int] = (3, 1)
) -> Mapping[str, np.ndarray]:
    entry = REGISTRY.find("processor", name)
    facts = RowFacts(np.asarray(prompt, np.int32), EOS, SIZES)
    return row_values(name, processor_of(name), REGISTRY.options(entry, options), facts).values


def state_of(rows: Sequence[Row]) -> SamplingState:
    num = len(rows)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (num, WIDTH))
    for row, case in enumerate(rows):
        tokens[row, : len(case.text)] = case.text
    return SamplingState(
        keys=np.asarray([(17, r.seed) for r in rows], np.uint32),
        positions=np.asarray([len(r.text) for r in rows], np.int32),
        params=device_params([OracleParams(temperature=r.temperature) for r in rows]),
        token_ids=tokens.astype(np.int32),
        prompt_lengths=np.asarray([len(r.prompt) for r in rows], np.int32),
    )


def own_of(name: str, rows: Sequence[Row]) -> dict[str, np.ndarray]:
    each = [fields_of(name, r.options or {}, r.prompt) for r in rows]
    stacked = {field: np.stack([values[field] for values in each]) for field in each[0]}
    return stacked | {IS_USED: np.asarray([r.options is not None for r in rows])}


def scores_of(name: str, rows: Sequence[Row]) -> np.ndarray:
    logits = np.stack([r.logits for r in rows])
    return np.asarray(
        jax.jit(processor_of(name).__call__)(logits, own_of(name, rows), state_of(rows))
    )


def check(
    name: str, oracle: Callable[[Row], np.ndarray], rows: Sequence[Row], changed: int
) -> None:
    """Each row is what `oracle` makes of it, float64 [VOCAB], and at least `changed` of the rows
    are other than they were.
    """
    got = scores_of(name, rows)
    wanted = [oracle(row) for row in rows]
    for row, score, right in zip(rows, got, wanted, strict=True):
        np.testing.assert_allclose(score, right, rtol=2e-6, atol=2e-6, err_msg=f"{name}, {row}")
    others = sum(
        not np.array_equal(s, r.logits.astype(np.float64))
        for s, r in zip(wanted, rows, strict=True)
    )
    assert others >= changed, f"{name}: only {others} cases change anything"


def banned(row: Row, tokens: set[int]) -> np.ndarray:
    left = row.logits.astype(np.float64)
    left[sorted(tokens)] = -np.inf
    return left if np.isfinite(left).any() else row.logits.astype(np.float64)


def only(*tokens: int) -> np.ndarray:
    """Logits of which these alone are possible."""
    logits = np.full(VOCAB, -np.inf)
    logits[list(tokens)] = np.arange(len(tokens)) + 1.0
    return logits
