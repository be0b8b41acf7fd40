"""Choosing an implementation: an explicit name or an error, else the best that can; every refusal is kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from enginebay.config import AUTO, Reason
from enginebay.errors import UnsupportedError, explain


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An implementation by name: the loaded part, or the reason why it could not be loaded."""

    name: str
    priority: int
    impl: Any = None
    unavailable: str | None = None


def choose(
    setting: str, wanted: str, candidates: Sequence[Candidate], why_not: Callable[[Any], str | None]
) -> tuple[Candidate, Reason]:
    """The candidate to use for `setting`.

    `wanted` is a name or "auto". A name that cannot serve is an UnsupportedError with its reason: an explicit choice
    never falls back. "auto" takes the highest priority that can, ties by name.
    """
    refused: list[tuple[str, str]] = []
    for candidate in sorted(candidates, key=lambda c: (-c.priority, c.name)):
        if wanted not in (AUTO, candidate.name):
            continue
        reason = candidate.unavailable or why_not(candidate.impl)
        if reason is None:
            why = "chosen by name" if wanted != AUTO else f"highest priority ({candidate.priority}) of those that can"
            return candidate, Reason(setting, candidate.name, why, tuple(refused))
        refused.append((candidate.name, reason))
    listing = "; ".join(f"{name}: {reason}" for name, reason in refused)
    able = [c.name for c in candidates if not c.unavailable and why_not(c.impl) is None]
    raise UnsupportedError(
        explain(f"{setting} = {wanted!r} cannot be used here ({listing})", ", ".join(able) or "nothing that is installed", "Choose one of these, or auto.")
    )


def common_layout(preferences: Sequence[Sequence[str]]) -> str | None:
    """The first layout in the first implementation's order that all of them have."""
    if not preferences:
        return None
    return next((layout for layout in preferences[0] if all(layout in p for p in preferences)), None)
