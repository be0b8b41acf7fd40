"""The rotary position embedding of a model, and the frequencies of its positions by the rules of
Hugging Face's modeling_rope_utils. Every rotary kernel uses them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal

import numpy as np

from enginebay.errors import UnsupportedError


@dataclasses.dataclass(frozen=True)
class RopeSpec:
    """The rotary position embedding of a model: base, number of rotated features, and the rule for
    long contexts.

    `scaling` names the rule; the fields after it are parameters of the rule, with the names of
    Hugging Face configurations. A rule that depends on the length of the text is resolved for one
    length: "dynamic" becomes "default" with a larger theta, and "longrope" divides the frequencies
    by `frequency_divisors`. "proportional" rotates only the first `proportion` of all pairs of
    features. The pairs are (i, i + rotary_dim / 2) ("rotate half").
    """

    theta: float
    rotary_dim: int
    scaling: Literal["default", "linear", "llama3", "yarn", "longrope", "proportional"] = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    mscale: float | None = None
    mscale_all_dim: float | None = None
    frequency_divisors: tuple[float, ...] = ()
    proportion: float = 1.0


@functools.lru_cache(maxsize=64)
def rope_frequencies(spec: RopeSpec) -> tuple[np.ndarray, np.float32]:
    """Return (inverse frequencies f32 [rotary_dim / 2], factor on cos and sin), computed in f64 and
    rounded once.
    """
    plain = 1.0 / spec.theta ** (
        np.arange(0, spec.rotary_dim, 2, dtype=np.float64) / spec.rotary_dim
    )
    match spec.scaling:
        case "default":
            inv_freq, factor = plain, 1.0
        case "linear":
            inv_freq, factor = plain / spec.factor, 1.0
        case "llama3":
            inv_freq, factor = _llama3(plain, spec), 1.0
        case "yarn":
            inv_freq, factor = _yarn(plain, spec), _yarn_attention_factor(spec)
        case "longrope":
            inv_freq, factor = (
                plain / np.asarray(spec.frequency_divisors),
                spec.attention_factor or 1.0,
            )
        case "proportional":
            turning = int(spec.proportion * spec.rotary_dim // 2)
            inv_freq, factor = (
                np.where(np.arange(len(plain)) < turning, plain, 0.0) / spec.factor,
                1.0,
            )
        case unknown:
            given = f"rope scaling {unknown!r}"
            allowed = "default, linear, llama3, longrope, proportional, yarn"
            raise UnsupportedError(given, allowed, "Set RopeSpec.scaling to one of these.")
    inv_freq = inv_freq.astype(np.float32)
    inv_freq.setflags(write=False)
    return inv_freq, np.float32(factor)


def _llama3(plain: np.ndarray, spec: RopeSpec) -> np.ndarray:
    """Low frequencies are divided by the factor, high ones are kept, and those between are
    interpolated (Llama 3.1's rule).
    """
    context = spec.original_max_position_embeddings
    wavelength = 2 * math.pi / plain
    longest, shortest = context / spec.low_freq_factor, context / spec.high_freq_factor
    smooth = (context / wavelength - spec.low_freq_factor) / (
        spec.high_freq_factor - spec.low_freq_factor
    )
    between = (1 - smooth) * plain / spec.factor + smooth * plain
    return np.where(
        wavelength > longest, plain / spec.factor, np.where(wavelength < shortest, plain, between)
    )


def _yarn(plain: np.ndarray, spec: RopeSpec) -> np.ndarray:
    """Yet another RoPE extension (arXiv 2309.00071): a ramp from kept to scaled frequencies."""

    def dimension_turning(num_rotations: float) -> float:
        turns = spec.original_max_position_embeddings / (num_rotations * 2 * math.pi)
        return spec.rotary_dim * math.log(turns) / (2 * math.log(spec.theta))

    low, high = dimension_turning(spec.beta_fast), dimension_turning(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    if low == high:
        high += 0.001
    stretched = np.clip((np.arange(spec.rotary_dim // 2) - low) / (high - low), 0, 1)
    return plain / spec.factor * stretched + plain * (1 - stretched)


def yarn_growth(factor: float, mscale: float) -> float:
    """Return the factor on values for a context that is `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn_attention_factor(spec: RopeSpec) -> float:
    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.mscale and spec.mscale_all_dim:
        return yarn_growth(spec.factor, spec.mscale) / yarn_growth(spec.factor, spec.mscale_all_dim)
    return yarn_growth(spec.factor, 1.0)
