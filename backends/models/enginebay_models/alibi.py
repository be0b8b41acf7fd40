"""ALiBi: each head lowers scores by a slope times the distance of query and key."""

from __future__ import annotations

import numpy as np

SLOPES = "slopes"
"""Name of attention's input f32 [query heads], in `AttnSpec.inputs` of models that have it."""

_MAX_BIAS = 8


def slopes_of(num_heads: int) -> np.ndarray:
    """Return the slopes of ALiBi, f32 [num_heads].

    For a power of two they are 2 ** (-8 * i / num_heads), with i from 1. Another number of heads
    takes slopes of the next power of two, first every second one.
    """
    count = 1 << (num_heads - 1).bit_length()
    slopes = 2.0 ** (-_MAX_BIAS * np.arange(1, count + 1) / count)
    if count != num_heads:
        slopes = np.concatenate([slopes[1::2], slopes[::2]])[:num_heads]
    return slopes.astype(np.float32)
