"""Slow and simple sampling in float64 NumPy; every sampler is compared with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from enginebay.contracts.sampler import DeviceParams
from enginebay.types import ROW_VALUES, SamplingParams


@dataclasses.dataclass(frozen=True, slots=True)
class OracleParams:
    """Sampling parameters of one row, as SamplingState has them."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0


def device_params(rows: Sequence[OracleParams | SamplingParams]) -> DeviceParams:
    """Return the parameters of rows as NumPy arrays [S], which jit takes without compiling a
    program.
    """
    columns: dict[str, Any] = {
        name: np.asarray([getattr(row, name, one.neutral) for row in rows], one.dtype)
        for name, one in ROW_VALUES.items()
    }
    return DeviceParams(**columns)


def penalised(
    logits: np.ndarray, params: OracleParams, prompt: Sequence[int], output: Sequence[int]
) -> np.ndarray:
    """Apply repetition, frequency and presence penalties for these tokens: logits [vocab] ->
    float64 [vocab].
    """
    scores = logits.astype(np.float64)
    for token in {*prompt, *output}:
        score = scores[token]
        scores[token] = (
            score / params.repetition_penalty if score > 0 else score * params.repetition_penalty
        )
    for token in output:
        scores[token] -= params.frequency_penalty
    for token in set(output):
        scores[token] -= params.presence_penalty
    return scores


def first_best(logits: np.ndarray) -> np.ndarray:
    """Return the lowest index of the largest value of logits [..., vocab]."""
    return np.argmax(logits, axis=-1)


SAME_MASS = 4 * float(np.finfo(np.float32).eps)
"""Scores that differ by less may have equal masses, each exp(score) within two roundings of f32."""


def kept_tokens(logits: np.ndarray, params: OracleParams, slack: float = 0.0) -> np.ndarray:
    """Return which tokens top_k, top_p and min_p keep, in this order: penalized logits [vocab] ->
    bool [vocab].

    `slack` moves every border outward (inward if negative) by this mass and by this share of a
    score, so that a result in lower precision lies between two sets. A token whose mass may equal
    that of the last kept (first dropped) token in f32 is kept (dropped) too; of tokens with equal
    scores, the first ones are kept. At least the first best token is kept.
    """
    z = _scaled(logits, params)
    order = np.argsort(-z, kind="stable")
    kth = z[order[params.top_k - 1]] if 0 < params.top_k < z.size else -np.inf
    mass = np.where(z >= kth, np.exp(z), 0.0)
    mass /= mass.sum()
    kept = np.isfinite(z)
    if np.isfinite(kth):
        kept &= z >= kth - slack * max(1.0, abs(kth))
    if params.top_p < 1.0:
        before = np.empty_like(mass)
        before[order] = np.concatenate([[0.0], np.cumsum(mass[order])[:-1]])
        kept &= before < params.top_p + slack
        dropped = z[~kept & np.isfinite(z)]
        if slack > 0 and kept.any():
            below = z[kept].min() - z
            kept |= (below > 0) & (below <= SAME_MASS)
        elif slack < 0 and dropped.size:
            above = z - dropped.max()
            kept &= ~((above > 0) & (above <= SAME_MASS))
    if params.min_p > 0.0:
        kept &= mass >= params.min_p * mass.max() * (1.0 - slack)
    kept[first_best(logits)] = True
    return kept


def probabilities(logits: np.ndarray, params: OracleParams) -> np.ndarray:
    """Return the probability of each token to be drawn: penalized logits [vocab] -> float64
    [vocab], sum 1.
    """
    if params.temperature == 0.0 or params.top_k == 1:
        return np.eye(logits.size)[first_best(logits)]
    mass = np.where(kept_tokens(logits, params), np.exp(_scaled(logits, params)), 0.0)
    return mass / mass.sum()


def _scaled(logits: np.ndarray, params: OracleParams) -> np.ndarray:
    wide = logits.astype(np.float64)
    return (wide - wide.max()) / params.temperature


def chi_square(counts: np.ndarray, expected: np.ndarray) -> tuple[float, int]:
    """Return Pearson's statistic and its degrees of freedom; bins that expect fewer than 8 draws
    are merged.
    """
    large = expected >= 8.0
    seen, wanted = counts[large].astype(np.float64), expected[large].astype(np.float64)
    rest_seen, rest_wanted = counts[~large].sum(), expected[~large].sum()
    if rest_wanted >= 8.0 or not large.any():
        seen, wanted = np.append(seen, rest_seen), np.append(wanted, rest_wanted)
    else:
        smallest = np.argmin(wanted)
        seen[smallest] += rest_seen
        wanted[smallest] += rest_wanted
    return float(((seen - wanted) ** 2 / wanted).sum()), int(wanted.size - 1)


def chi_square_limit(degrees: int, normal_quantile: float = 5.0) -> float:
    """Return the statistic that chance exceeds as rarely as a normal variable exceeds
    `normal_quantile` (3e-7 for 5).

    Uses the approximation of Wilson and Hilferty (1931).
    """
    spread = 2.0 / (9.0 * max(degrees, 1))
    return max(degrees, 1) * (1.0 - spread + normal_quantile * spread**0.5) ** 3
