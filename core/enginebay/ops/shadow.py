"""What shadow mode has found: how far a candidate is from the chosen implementation on live steps,
and how fast it is.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class LayerDifference:
    """The largest differences of one layer's outputs in one phase, over all steps that were
    compared.

    `absolute` is the largest |candidate - chosen| where both are finite; `relative` that over the
    largest |chosen| of its step. `num_nonfinite` counts values of the candidate that are not
    finite, `num_cache_differences` new tokens whose keys or values it left otherwise in the cache,
    `num_tokens` the tokens compared.
    """

    phase: str
    group: str
    layer: int
    absolute: float
    relative: float
    num_nonfinite: int
    num_cache_differences: int
    num_tokens: int

    def joined(self, other: LayerDifference) -> LayerDifference:
        """This and another step of the same layer."""
        return dataclasses.replace(
            self,
            absolute=max(self.absolute, other.absolute),
            relative=max(self.relative, other.relative),
            num_nonfinite=self.num_nonfinite + other.num_nonfinite,
            num_cache_differences=self.num_cache_differences + other.num_cache_differences,
            num_tokens=self.num_tokens + other.num_tokens,
        )


@dataclasses.dataclass(frozen=True)
class ShadowPhase:
    """One phase: the chosen implementation, steps that ran and were compared, and the median
    seconds that all layers of a step took among the last ones, nan while none was compared.
    """

    phase: str
    chosen: str
    num_steps: int
    num_compared: int
    chosen_s: float
    candidate_s: float


@dataclasses.dataclass(frozen=True)
class ShadowReport:
    """All that a shadow has found so far. `error` is the first thing that went wrong, of
    `num_failed` steps.
    """

    op: str
    name: str
    share: float
    phases: tuple[ShadowPhase, ...]
    layers: tuple[LayerDifference, ...]
    num_failed: int
    error: str | None

    def worst(self, phase: str) -> LayerDifference | None:
        """The layer that is furthest off in a phase; values that are not finite count most."""
        found = [layer for layer in self.layers if layer.phase == phase]
        return max(found, key=lambda layer: (layer.num_nonfinite, layer.absolute), default=None)

    def record(self) -> dict[str, Any]:
        """The same as plain values."""
        return dataclasses.asdict(self)
