"""Chooses fused ops: one kernel in place of several ops."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from enginebay.config import Reason
from enginebay.config_sections import AUTO
from enginebay.ops.select import Candidate, choose

COMPOSED = "composed"
"""The name in the record of a fused op that its separate parts compute."""


@dataclasses.dataclass(frozen=True)
class FusedPart:
    """One of the ops that a fused op replaces: its implementation, and whether the user chose it by
    name.
    """

    op: str
    chosen: Candidate
    is_named: bool


def choose_fused(
    setting: str, wanted: str, candidates: Sequence[Candidate], parts: Sequence[FusedPart]
) -> tuple[Candidate | None, Reason]:
    """Return the fused implementation for `setting`, or None where the separate parts compute it.

    A name is chosen as in `choose`. "auto" takes the best candidate that can be used, unless a part
    was chosen by name or a part has a higher priority. At equal priorities a built-in part wins
    over a fused implementation that is not built in.
    """
    named = [part.op for part in parts if part.is_named]
    if wanted == AUTO and named:
        return None, Reason(setting, COMPOSED, f"{', '.join(named)} chosen by name")
    if wanted == AUTO and all(candidate.unavailable for candidate in candidates):
        refused = tuple((c.name, c.unavailable or "") for c in candidates)
        return None, Reason(setting, COMPOSED, "no implementation can serve", refused)
    found, reason = choose(setting, wanted, candidates)
    better = [part for part in parts if _goes_before(part.chosen, found)]
    if wanted == AUTO and better:
        names = ", ".join(f"{part.chosen.name} of {part.op}" for part in better)
        is_lower = better[0].chosen.priority > found.priority
        why = f"{names} {'has a higher priority than any fused one' if is_lower else 'is built in'}"
        behind = (
            "lower priority"
            if is_lower
            else f"the same priority ({found.priority}), and not built in"
        )
        return None, Reason(setting, COMPOSED, why, ((found.name, behind), *reason.refused))
    return found, reason


def _goes_before(part: Candidate, fused: Candidate) -> bool:
    if part.priority == fused.priority:
        return part.built_in and not fused.built_in
    return part.priority > fused.priority
