"""The numbers in attention problems: queries, keys and values that give scores of a kind."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from enginebay.ops.spec import AttnSpec

LARGE_SCORE, VERY_LARGE_SCORE = 200.0, 100_000.0
"""Scores of "outlier", "low" and "high", and of "very_low" and "very_high": products that float16
does not hold, and scores below a mask of -10,000.
"""

PEAK_SCORE = 6.0
"""The score of one key, beside which hundreds of others have about the same weight together."""

CANCELLED_SCORE = 5000.0
"""Size of the products whose sum is an ordinary score, as a score."""

RISE = 2.0
"""How much the scores of a row rise from its first to its last key."""

FAR, FAR_FLOAT16 = 2.0**30, 2.0**13
"""About the values of kind "far". Float16 does not hold the scales of 8-bit codes for them, and
eight bits do not hold zero points, because the values are almost equal.
"""

EXTREME_SCORES = ("very_low", "very_high", "cancelling", "rising", "peak")
"""Kinds of scores that are no values of an axis: programs of cases also run with one of these.

very_low, very_high: about -100,000 and +100,000. cancelling: sums of large products that cancel
each other. rising: scores rise slowly along the row, so that each block has a new maximum. peak:
one key weighs as much as hundreds of others.
"""


class OtherNumbers(NamedTuple):
    """A kind of scores and a kind of values, see the axes of attention."""

    scores: str
    values: str


def extreme_numbers(spec: AttnSpec, name: str, values: str) -> tuple[OtherNumbers, ...]:
    """Return the extreme numbers for a case of this name and kind of values, in an order that
    depends on the name. What rounding loses shows in 16 bits alone.
    """
    turn = zlib.crc32(name.encode()) // 3
    large: tuple[OtherNumbers, ...] = tuple(
        OtherNumbers(scores, values) for scores in EXTREME_SCORES[:2]
    )
    if spec.kv_storage is not None and not spec.v_is_k_prefix:
        large = tuple(OtherNumbers(scores, "far") for scores in ("plain", *EXTREME_SCORES[:2]))
    elif spec.q_dtype != "float32":
        large += (
            OtherNumbers("cancelling", values),
            OtherNumbers("rising", "one_sign"),
            OtherNumbers("peak", "plain"),
        )
    start = turn % len(large)
    return large[start:] + large[:start]


class CommonParts(NamedTuple):
    """What all queries, and all keys, of a KV head have in common: f64 [Hkv, D] each. Scores are
    their products; a key may have only a share of the common part.
    """

    queries: np.ndarray
    keys: np.ndarray


def common_parts(spec: AttnSpec, scores: str, rng: np.random.Generator) -> CommonParts:
    """Return the common parts for a kind of scores; zeros for plain scores."""
    shape = (spec.num_kv_heads, spec.head_dim)
    if scores == "plain":
        return CommonParts(np.zeros(shape), np.zeros(shape))
    unit = _units(rng.normal(size=shape))
    if scores == "rising":
        slope = 0.125 / spec.softmax_scale
        return CommonParts(unit * slope, unit * RISE / 0.125)
    if scores == "cancelling":
        other = _units(_without(rng.normal(size=shape), unit))
        size = np.sqrt(CANCELLED_SCORE / spec.softmax_scale)
        return CommonParts(unit * size, other * size)
    score = {"peak": PEAK_SCORE, "very_low": VERY_LARGE_SCORE, "very_high": VERY_LARGE_SCORE}
    toward = unit * np.sqrt(score.get(scores, LARGE_SCORE) / spec.softmax_scale)
    return CommonParts(-toward if scores in ("low", "very_low") else toward, toward)


def _units(vectors: np.ndarray) -> np.ndarray:
    return np.asarray(vectors / np.linalg.norm(vectors, axis=-1, keepdims=True))


def _without(x: np.ndarray, direction: np.ndarray) -> np.ndarray:
    """Return x [..., D] without its part along a direction [..., D]; unchanged where that is 0."""
    norm = (direction**2).sum(axis=-1, keepdims=True)
    along = (x * direction).sum(axis=-1, keepdims=True) / np.where(norm == 0, 1.0, norm)
    return np.asarray(x - along * direction)


def random_queries(
    spec: AttnSpec, scores: str, num: int, rng: np.random.Generator, parts: CommonParts
) -> np.ndarray:
    """Return `num` queries [num, Hq, D]."""
    own = rng.normal(size=(num, spec.num_q_heads, spec.head_dim))
    if scores == "rising":
        own *= 0.05
    elif scores == "cancelling":
        own = _without(own, np.repeat(parts.keys, spec.group, axis=0))
    own += np.repeat(parts.queries, spec.group, axis=0)
    return own.astype(jnp.dtype(spec.q_dtype))


def random_keys(
    spec: AttnSpec,
    scores: str,
    kv_lens: Sequence[int],
    rng: np.random.Generator,
    parts: CommonParts,
) -> tuple[np.ndarray, ...]:
    """Return the keys [kv_len, Hkv, D] of each row, moved by the common part. With scores "outlier"
    and "peak", only one key of each head is moved; its position differs between rows and heads.
    """
    keys = []
    for row, total in enumerate(kv_lens):
        own = rng.normal(size=(total, *parts.keys.shape))
        if scores in ("outlier", "peak"):
            for head in range(parts.keys.shape[0] if total else 0):
                own[_outlier(row + 2 * head, total), head] += parts.keys[head]
        elif scores == "rising":
            share = np.arange(1, total + 1)[:, None, None] / max(1, total)
            own += parts.keys * share
        elif scores == "cancelling":
            sign = rng.choice([-1.0, 1.0], size=(total, parts.keys.shape[0], 1))
            own = _without(own, parts.queries) + parts.keys * sign
        else:
            own += parts.keys
        keys.append(own.astype(jnp.dtype(spec.kv_dtype)))
    return tuple(keys)


def _outlier(number: int, total: int) -> int:
    """Return the position of an outlier: the last key, the first key, or a key between, in turn."""
    return (total - 1, 0, total // 2, total // 3, max(total - 2, 0))[number % 5]


def random_values(
    kind: str, dtype: str, shape: tuple[int, ...], rng: np.random.Generator
) -> np.ndarray:
    """Return f64 values of a kind: "plain", "one_sign" (about 1) or "far" (almost equal to a large
    number that the dtype holds).
    """
    drawn = rng.normal(size=shape)
    if kind == "far":
        return np.asarray((FAR_FLOAT16 if dtype == "float16" else FAR) * (1.5 + 0.01 * drawn))
    return np.asarray(1.0 + 0.25 * drawn) if kind == "one_sign" else drawn
