"""The optional inputs of attention that enginebay knows: each is one number per query head."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np


def _sinks(rng: np.random.Generator, num_heads: int) -> np.ndarray:
    return 3.0 * rng.normal(size=num_heads)


def _slopes(_: np.random.Generator, num_heads: int) -> np.ndarray:
    return 2.0 ** -np.linspace(1, 8, num_heads)


@dataclasses.dataclass(frozen=True)
class HeadInput:
    """An input f32 [Hq] of attention.

    feature: the name by which a kernel declares in `Caps.features` that it takes the input, and the
    name of the axis on which checks vary it. draw: (random numbers, Hq) -> values [Hq] for checks.
    """

    feature: str
    draw: Callable[[np.random.Generator, int], np.ndarray]


HEAD_INPUTS: Mapping[str, HeadInput] = {
    "sinks": HeadInput("sinks", _sinks),
    "slopes": HeadInput("alibi", _slopes),
}
"""The inputs by name; a model names those that it passes in `AttnSpec.inputs`.

sinks: one additional score per query head that takes part in the softmax but has no value. slopes:
slope * (j - p) is added to the scaled and capped score of query p and key j (ALiBi).

A kernel that declares the feature computes the input; a check compares it with
`enginebay_testing.oracle.attend`. Devices split each input as they split the query heads.
"""


def draw_inputs(
    names: tuple[str, ...], num_heads: int, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Return values f32 [num_heads] for checks of each named input that enginebay knows."""
    return {
        name: one.draw(rng, num_heads).astype(np.float32)
        for name, one in HEAD_INPUTS.items()
        if name in names
    }
