"""Which program serves a step: the variant and the logits processors that its rows need, and what
is compiled for them.
"""

from __future__ import annotations

from collections.abc import Iterator

from enginebay.executor.keys import StepNeeds
from enginebay.types import StepVariant


class Scoping:
    """Remembers what requests have asked of sampling so far, and what steps are to be compiled for.

    A step is compiled for all of that, since what came once comes again. So a bucket is compiled
    anew only when something is asked for the first time, and a service of greedy requests never
    compiles a sampler.

    Both methods return a variant and the names of its logits processors; None for all that the
    engine was made with, which is what warmup() compiles.
    """

    def __init__(self, *, has_greedy: bool) -> None:
        self._largest = StepVariant.GREEDY if has_greedy else StepVariant.SAMPLE
        self._sets: list[frozenset[str]] = [frozenset()]

    def serving(self, need: StepNeeds) -> Iterator[tuple[StepVariant, frozenset[str] | None]]:
        """What serves, from the least to the largest: any of these that is compiled will do."""
        full = StepVariant.FULL
        yield from ((v, frozenset[str]()) for v in StepVariant if need.variant <= v < full)
        yield from ((full, names) for names in self._sets if names >= need.names)
        yield full, None

    def to_compile(self, need: StepNeeds) -> tuple[StepVariant, frozenset[str]]:
        """What to compile when none of them is: for this, and all that was asked for before."""
        self._largest = max(self._largest, need.variant)
        if not need.names <= self._sets[-1]:
            self._sets.append(self._sets[-1] | need.names)
        is_full = self._largest is StepVariant.FULL
        return self._largest, self._sets[-1] if is_full else frozenset()
