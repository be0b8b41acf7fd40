"""Chooses an implementation among candidates, and records why the others were not chosen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from enginebay.config import Reason
from enginebay.config_sections import AUTO
from enginebay.errors import UnsupportedError, unknown_name


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One implementation to choose from: the loaded implementation, or the reason why it cannot be
    used.
    """

    name: str
    priority: int
    impl: Any = None
    unavailable: str | None = None
    custom_calls: tuple[str, ...] = ()
    register_call: str | None = None
    """The kernel's capability of this name."""
    interpreted: bool = False
    """Whether it is for another platform and is interpreted on this one."""
    built_in: bool = False
    """Whether it is part of enginebay: for equal priorities "auto" takes a built-in candidate."""


def is_import_path(name: str) -> bool:
    """Return whether the name of a kernel is an import path ("module:attribute")."""
    return ":" in name


def choose(
    setting: str,
    wanted: str,
    candidates: Sequence[Candidate],
    why_not: Callable[[Any], str | None] | None = None,
    faster: Callable[[Sequence[Any]], tuple[Any, str] | None] | None = None,
) -> tuple[Candidate, Reason]:
    """Return the candidate to use for `setting`, and the reason.

    `wanted` is a name or "auto". UnsupportedError, with the reason, for a name that cannot be used
    here: an explicit choice never falls back to another one. UnknownNameError for a name that no
    candidate has. "auto" takes the usable candidate with the highest priority; for equal
    priorities a built-in one, then the first by name. The Reason lists all other candidates.
    `why_not` returns why an implementation cannot be used, for a candidate without such a reason.
    `faster` may choose another usable candidate: it gets their implementations in this order, and
    returns one of them with the reason, or None.
    """
    if wanted == AUTO:  # implementations given by import path are used only where they are named
        candidates = [candidate for candidate in candidates if not is_import_path(candidate.name)]
    if wanted != AUTO and all(candidate.name != wanted for candidate in candidates):
        names = [candidate.name for candidate in candidates]
        raise unknown_name(setting, wanted, names, "`enginebay plugins` lists what is installed.")
    ranked = sorted(candidates, key=lambda c: (-c.priority, not c.built_in, c.name))
    reasons = [(c, c.unavailable or (why_not and why_not(c.impl))) for c in ranked]
    able = [candidate for candidate, reason in reasons if reason is None]
    if wanted != AUTO:
        refused = [f"{c.name}: {reason}" for c, reason in reasons if c.name == wanted]
        chosen = next((candidate for candidate in able if candidate.name == wanted), None)
        if chosen is not None:
            how = "chosen by name, interpreted: slow" if chosen.interpreted else "chosen by name"
            return chosen, Reason(setting, wanted, how)
    else:
        refused = [f"{c.name}: {reason}" for c, reason in reasons]
        if able:
            first, why = able[0], f"highest priority of those that can ({able[0].priority})"
            better = faster([candidate.impl for candidate in able]) if faster is not None else None
            if better is not None:
                first, why = next(c for c in able if c.impl is better[0]), better[1]
            others = tuple(
                (c.name, reason or behind(c, first)) for c, reason in reasons if c is not first
            )
            return first, Reason(setting, first.name, why, others)
    raise UnsupportedError(
        f"{setting} = {wanted!r} cannot be used here ({'; '.join(refused) or 'none is installed'})",
        ", ".join(candidate.name for candidate in able) or "nothing that is installed",
        "Choose one of these, or auto." if able else "`enginebay plugins` lists what is installed.",
    )


def behind(candidate: Any, first: Any) -> str:
    """Return why `first` was chosen over `candidate`; both have `priority` and `built_in`."""
    if candidate.priority > first.priority:
        return "measured slower, or not measured in the same buckets"
    if candidate.priority == first.priority:
        how = (
            "later by name" if candidate.built_in == first.built_in else "and the other is built in"
        )
        return f"the same priority ({candidate.priority}), {how}"
    return f"lower priority ({candidate.priority})"


def common_layout(preferences: Sequence[Sequence[str]]) -> str | None:
    """Return the first layout of the first list that is in all lists, or None."""
    if not preferences:
        return None
    return next(
        (layout for layout in preferences[0] if all(layout in p for p in preferences)), None
    )
