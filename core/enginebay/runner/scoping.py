"""Which program serves a step: the scope and the logits processors that its rows need, and what is
compiled for them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from enginebay.runner.step import SCOPES, Scope


@dataclasses.dataclass(frozen=True, slots=True)
class Need:
    """The least that serves a step's rows: a scope and, for full, the names of logits processors."""

    scope: Scope
    names: frozenset[str] = frozenset()


UNKNOWN = Need("full")
"""Of a step that says nothing of its rows; they use no logits processor."""

Form = tuple[Scope, frozenset[str] | None]
"""A scope that a step can be compiled in, and its logits processors; None for all that the engine
was made with.
"""

EVERYTHING: Form = ("full", None)
"""What warmup() compiles."""


class Scoping:
    """Remembers what requests have asked of sampling so far, and what steps are to be compiled for.

    A step is compiled for all of that, since what came once comes again. So a bucket is compiled
    anew only when something is asked for the first time, and a service of greedy requests never
    compiles a sampler.
    """

    def __init__(self, *, has_greedy: bool) -> None:
        self._largest: Scope = "greedy" if has_greedy else "draw"
        self._sets: list[frozenset[str]] = [frozenset()]

    def forms(self, need: Need) -> Iterator[Form]:
        """The forms that serve, from the least to the largest: any that is compiled will do."""
        at_least = SCOPES.index(need.scope)
        yield from ((scope, frozenset[str]()) for scope in SCOPES[at_least:] if scope != "full")
        yield from (("full", names) for names in self._sets if names >= need.names)
        yield EVERYTHING

    def to_compile(self, need: Need) -> Form:
        """The form to compile when none of them is: for this, and all that was asked for before."""
        self._largest = SCOPES[max(SCOPES.index(self._largest), SCOPES.index(need.scope))]
        if not need.names <= self._sets[-1]:
            self._sets.append(self._sets[-1] | need.names)
        return self._largest, self._sets[-1] if self._largest == "full" else frozenset()
