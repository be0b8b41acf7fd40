"""Results of shadow mode: how much a candidate's outputs differ from the chosen implementation's on
live steps, and how fast it is.
"""

from __future__ import annotations

import dataclasses
import html
from typing import Any

from enginebay.html_table import html_table


@dataclasses.dataclass(frozen=True)
class LayerDifference:
    """The largest differences in the outputs of one layer in one phase, over all compared steps.

    absolute: the largest |candidate - chosen| where both are finite. relative: the largest ratio of
    this difference to the largest |chosen| of the step. num_nonfinite: number of values of the
    candidate that are not finite. num_cache_differences: number of new tokens whose keys or values
    in the cache differ. num_tokens: number of compared tokens.
    """

    phase: str
    group: str
    layer: int
    absolute: float
    relative: float
    num_nonfinite: int
    num_cache_differences: int
    num_tokens: int


@dataclasses.dataclass(frozen=True)
class ShadowPhase:
    """One phase: the chosen implementation, the number of steps that ran and that were compared,
    and the median seconds that all layers of a step took in the last compared steps (nan when no
    step was compared).
    """

    phase: str
    chosen: str
    num_steps: int
    num_compared: int
    chosen_s: float
    candidate_s: float


@dataclasses.dataclass(frozen=True)
class ShadowReport:
    """The results of shadow mode so far. `num_failed` steps of the candidate raised an error;
    `error` is the first of these errors.
    """

    op: str
    name: str
    share: float
    phases: tuple[ShadowPhase, ...]
    layers: tuple[LayerDifference, ...]
    num_failed: int
    error: str | None

    def worst(self, phase: str) -> LayerDifference | None:
        """Return the layer with the largest difference in a phase, first by num_nonfinite and then
        by absolute difference; None when no layer was compared.
        """
        found = [layer for layer in self.layers if layer.phase == phase]
        return max(found, key=lambda layer: (layer.num_nonfinite, layer.absolute), default=None)

    def record(self) -> dict[str, Any]:
        """Return the report as plain Python values."""
        return dataclasses.asdict(self)

    def _repr_html_(self) -> str:
        """Return what notebooks show: a row for each phase, with its worst layer."""
        rows = []
        for phase in self.phases:
            worst = self.worst(phase.phase)
            found = "" if worst is None else f"layer {worst.layer}: {worst.absolute:.2g}"
            if worst is not None and worst.num_nonfinite:
                found += f", {worst.num_nonfinite} values not finite"
            cells = (
                phase.phase,
                phase.chosen,
                f"{phase.num_compared} of {phase.num_steps}",
                found,
                f"{1e3 * phase.chosen_s:.3f}",
                f"{1e3 * phase.candidate_s:.3f}",
            )
            rows.append(cells)
        names = ("phase", "chosen", "steps compared", "largest difference", "chosen, ms")
        table = html_table((*names, "candidate, ms"), rows)
        title = html.escape(f"{self.op}: {self.name}, on {self.share:.0%} of the steps")
        failed = "" if self.error is None else f"{self.num_failed} steps failed: {self.error}"
        return f"<p><b>{title}</b></p>{table}<p>{html.escape(failed)}</p>"
