"""Fused ops: one kernel in place of several ops, where there is one and nothing speaks for its
parts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from enginebay.config import Reason
from enginebay.config_sections import AUTO
from enginebay.ops.select import Candidate, choose

COMPOSED = "composed"
"""How the record names a fused op that is computed by its parts."""


@dataclasses.dataclass(frozen=True)
class FusedPart:
    """An op that a fused one is made of: its implementation, and whether it was chosen by name."""

    op: str
    chosen: Candidate
    is_named: bool


def choose_fused(
    setting: str, wanted: str, candidates: Sequence[Candidate], parts: Sequence[FusedPart]
) -> tuple[Candidate | None, Reason]:
    """The fused implementation to use for `setting`, or None where its parts compute it.

    By name as `choose`. "auto" takes the best candidate that can, if its priority is at least that
    of every part (above that of a built-in part, if it is not built in itself) and no part was
    chosen by name: who names the implementation of an op gets it wherever the op is computed.
    """
    named = [part.op for part in parts if part.is_named]
    if wanted == AUTO and named:
        return None, Reason(setting, COMPOSED, f"{', '.join(named)} chosen by name")
    if wanted == AUTO and all(candidate.unavailable for candidate in candidates):
        refused = tuple((c.name, c.unavailable or "") for c in candidates)
        return None, Reason(setting, COMPOSED, "no implementation can serve", refused)
    found, reason = choose(setting, wanted, candidates, lambda _: None)
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
