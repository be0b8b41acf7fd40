"""Scoping: which programs serve a step, by its variant and logits processors, and which to
compile.
"""

from __future__ import annotations

from collections.abc import Iterator

from enginebay.executor.keys import StepNeeds
from enginebay.types import StepVariant


class Scoping:
    """Remembers the variants and logits processors that requests have needed so far.

    A new program is compiled for all of these, because what was needed once is needed again. So a
    bucket is compiled again only when a request needs something for the first time, and a service
    of greedy requests never compiles a sampler.

    Both methods return a variant and the names of its logits processors. None means all processors
    of the engine, as warmup() compiles them.
    """

    def __init__(self, *, has_greedy: bool) -> None:
        self._largest = StepVariant.GREEDY if has_greedy else StepVariant.SAMPLE
        self._sets: list[frozenset[str]] = [frozenset()]

    def serving(self, need: StepNeeds) -> Iterator[tuple[StepVariant, frozenset[str] | None]]:
        """The variants that serve a step, smallest first: any compiled one will do."""
        full = StepVariant.FULL
        yield from ((v, frozenset[str]()) for v in StepVariant if need.variant <= v < full)
        yield from ((full, names) for names in self._sets if names >= need.names)
        yield full, None

    def to_compile(self, need: StepNeeds) -> tuple[StepVariant, frozenset[str]]:
        """The variant to compile when none of these is compiled: it serves all needs so far."""
        self._largest = max(self._largest, need.variant)
        if not need.names <= self._sets[-1]:
            self._sets.append(self._sets[-1] | need.names)
        is_full = self._largest is StepVariant.FULL
        return self._largest, self._sets[-1] if is_full else frozenset()
