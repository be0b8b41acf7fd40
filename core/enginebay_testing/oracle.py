"""Slow and simple float64 NumPy versions of the ops; every implementation is compared with them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from enginebay.ops.rotary import RopeSpec
from enginebay.ops.spec import AttnSpec
from enginebay.weights import QuantizedArray

NO_INPUTS: Mapping[str, np.ndarray] = {}

EPS = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
"""Distance from 1 to the next value of a dtype."""

LOWEST = -1e300
"""Lower bound of the highest score, so that no infinity is subtracted from another."""


def attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    spec: AttnSpec,
    *,
    inputs: Mapping[str, np.ndarray] = NO_INPUTS,
    weights_dtype: np.dtype | None = None,
    positions: np.ndarray | None = None,
    kept: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Attend one row: queries q [n, Hq, D] over k and v [kv_len, Hkv, D] -> (out [n, Hq, D], lse
    [n, Hq]), f64. The width of `v` may differ; it is also the width of `out`.

    `inputs`: HEAD_INPUTS by name, each [Hq]. `positions` int [n] are the positions of the queries
    (default: the last n). `kept` bool [kv_len]: the keys that are not left out. With
    `weights_dtype`, the unnormalized weights and the output are rounded to this dtype, as
    implementations in narrow dtypes must do; the resulting error is the unit of their allowed
    error. A query that sees no key gives 0.
    """
    num_queries, kv_len = q.shape[0], k.shape[0]
    if positions is None:
        positions = np.arange(kv_len - num_queries, kv_len)
    heads, group = spec.num_kv_heads, spec.group
    grouped = q.astype(np.float64).reshape(num_queries, heads, group, -1).transpose(1, 2, 0, 3)
    scores = grouped @ k.astype(np.float64).transpose(1, 2, 0)[:, None] * spec.softmax_scale
    if spec.softcap is not None:
        scores = spec.softcap * np.tanh(scores / spec.softcap)
    per_head = {n: x.astype(np.float64).reshape(heads, group, 1, 1) for n, x in inputs.items()}
    if "slopes" in per_head:
        scores = scores + per_head["slopes"] * (np.arange(kv_len) - positions[:, None])
    visible = _visible(positions, kv_len, spec) & (True if kept is None else kept)
    scores = np.where(visible, scores, -np.inf)
    highest = np.maximum(scores.max(axis=-1, keepdims=True), LOWEST)
    sink = per_head.get("sinks")
    if sink is not None:
        highest = np.maximum(highest, sink)
    weights = np.exp(scores - highest)
    total = weights.sum(axis=-1, keepdims=True) + (0.0 if sink is None else np.exp(sink - highest))
    total = np.where(total == 0, 1.0, total)
    if weights_dtype is not None:
        weights = weights.astype(weights_dtype).astype(np.float64)
    out = weights @ v.astype(np.float64).transpose(1, 0, 2)[:, None] / total
    lse = (highest + np.log(total))[..., 0]
    out, lse = (
        out.transpose(2, 0, 1, 3).reshape(*q.shape[:2], -1),
        lse.transpose(2, 0, 1).reshape(q.shape[:2]),
    )
    return (out if weights_dtype is None else out.astype(weights_dtype).astype(np.float64)), lse


def _visible(positions: np.ndarray, kv_len: int, spec: AttnSpec) -> np.ndarray:
    """Return bool [n, kv_len]: which keys the queries at `positions` [n] attend to."""
    keys, queries = np.arange(kv_len)[None], positions[:, None]
    seen = keys <= queries if spec.causal else np.ones((positions.size, kv_len), bool)
    return seen if spec.window is None else seen & (keys > queries - spec.window)


def largest_score(q: np.ndarray, k: np.ndarray, spec: AttnSpec) -> float:
    """Return a bound on |score| before any soft cap; softmax turns the absolute error of a score
    into a relative error of its weight.
    """
    norms = np.linalg.norm(q.astype(np.float64), axis=-1).max(initial=0.0)
    return float(
        norms * np.linalg.norm(k.astype(np.float64), axis=-1).max(initial=0.0) * spec.softmax_scale
    )


def linear(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """x [T, *in_dims], weight [*out_dims, *in_dims] -> f64 [T, *out_dims]."""
    num_in = math.prod(x.shape[1:])
    out_dims = weight.shape[: weight.ndim - (x.ndim - 1)]
    matrix = weight.astype(np.float64).reshape(math.prod(out_dims), num_in)
    flat = x.astype(np.float64).reshape(x.shape[0], num_in) @ matrix.T
    out = flat.reshape(x.shape[0], *out_dims)
    return out if bias is None else out + bias.astype(np.float64)


def quantized_weight(weight: QuantizedArray) -> np.ndarray:
    """The numbers f64 [*outputs, *inputs] of a quantised weight."""
    scales = np.asarray(weight.scales).astype(np.float64)
    of_a_group = math.prod(weight.shape[scales.ndim - 1 :]) // scales.shape[-1]
    shares = np.asarray(weight.values).astype(np.float64).reshape(*scales.shape, of_a_group)
    if weight.zero_points is not None:
        shares = shares - np.asarray(weight.zero_points).astype(np.float64)[..., None]
    return (shares * scales[..., None]).reshape(weight.shape)


def grouped_linear(x: np.ndarray, weight: np.ndarray, group_sizes: np.ndarray) -> np.ndarray:
    """x [T, inputs], weight [groups, outputs, inputs], group_sizes [groups] -> f64 [T, outputs]."""
    out, first = np.zeros((x.shape[0], weight.shape[1])), 0
    for matrix, size in zip(weight, group_sizes, strict=True):
        rows = slice(first, first + int(size))
        out[rows], first = linear(x[rows], matrix), rows.stop
    return out


def f32_sum_error(num_terms: int) -> float:
    """Return a bound on the error of an f32 sum, as a share of the sum of the magnitudes.

    The errors are a random walk: each step has a standard deviation of 0.29 epsilons at most, and
    of a million sums the worst are 5.5 deviations of the whole walk off.
    """
    return EPS["float32"] * max(4.0, 1.6 * math.sqrt(num_terms))


def rms_norm(x: np.ndarray, weight: np.ndarray, *, eps: float) -> np.ndarray:
    """x [..., features] / rms(x) * weight, f64."""
    wide = x.astype(np.float64)
    return (
        wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + eps) * weight.astype(np.float64)
    )


def rope(x: np.ndarray, positions: np.ndarray, spec: RopeSpec) -> np.ndarray:
    """Rotate features i and i + rotary_dim / 2 of x [T, heads, head_dim] by position * frequency i,
    f64.
    """
    frequencies, factor = rope_frequencies(spec)
    out, half = x.astype(np.float64), spec.rotary_dim // 2
    first, second = out[..., :half].copy(), out[..., half : spec.rotary_dim].copy()
    angles = (positions[:, None] * frequencies)[:, None, :]
    out[..., :half] = (first * np.cos(angles) - second * np.sin(angles)) * factor
    out[..., half : spec.rotary_dim] = (second * np.cos(angles) + first * np.sin(angles)) * factor
    return out


def rope_frequencies(spec: RopeSpec) -> tuple[np.ndarray, float]:
    """Return (f64 [rotary_dim / 2], factor on cos and sin), pair by pair by the
    published formulas.
    """
    pairs = [_frequency(i, spec) for i in range(spec.rotary_dim // 2)]
    factor = (spec.attention_factor or 1.0) if spec.scaling == "longrope" else 1.0
    if spec.scaling == "yarn":
        factor = (
            _growth(spec.factor, 1.0) if spec.attention_factor is None else spec.attention_factor
        )
        if spec.attention_factor is None and spec.mscale and spec.mscale_all_dim:
            factor = _growth(spec.factor, spec.mscale) / _growth(spec.factor, spec.mscale_all_dim)
    return np.array(pairs), factor


def _growth(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _frequency(i: int, spec: RopeSpec) -> float:
    plain = spec.theta ** (-2 * i / spec.rotary_dim)
    context = spec.original_max_position_embeddings
    if spec.scaling == "linear":
        return plain / spec.factor
    if spec.scaling == "longrope":
        return plain / spec.frequency_divisors[i]
    if spec.scaling == "proportional":
        return plain / spec.factor if 2 * (i + 1) <= spec.proportion * spec.rotary_dim else 0.0
    if spec.scaling == "llama3":
        turns = context * plain / (2 * math.pi)
        if turns < spec.low_freq_factor:
            return plain / spec.factor
        if turns > spec.high_freq_factor:
            return plain
        share = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
        return (1 - share) * plain / spec.factor + share * plain
    if spec.scaling == "yarn":
        low, high = _yarn_range(spec)
        share = min(1.0, max(0.0, (i - low) / (high - low)))
        return share * plain / spec.factor + (1 - share) * plain
    return plain


def _yarn_range(spec: RopeSpec) -> tuple[float, float]:
    """Return the pairs between which frequencies change from unscaled to fully scaled: the pairs
    that rotate beta_fast and beta_slow times.
    """
    context = spec.original_max_position_embeddings

    def pair(turns: float) -> float:
        return (
            spec.rotary_dim / 2 * math.log(context / (2 * math.pi * turns)) / math.log(spec.theta)
        )

    low, high = pair(spec.beta_fast), pair(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    return low, high + (0.001 if low == high else 0.0)
