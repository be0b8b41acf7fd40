"""Scoping: which programs serve a step, by its variant, logits processors and adapters, and which
to compile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from enginebay.contracts.step_key import StepKey, StepNeeds
from enginebay.types import StepVariant


class Scoping:
    """Remembers the variants and logits processors that requests have needed so far, and whether
    requests had adapters.

    A new program is compiled for all of these, because what was needed once is needed again. So a
    bucket is compiled again only when a request needs something for the first time, a service of
    greedy requests never compiles a sampler, and a service without adapters runs the steps of the
    model alone.

    The names of the logits processors in a key are None for all processors of the engine, as
    warmup() compiles them.
    """

    def __init__(self, *, has_greedy: bool) -> None:
        self._largest = StepVariant.GREEDY if has_greedy else StepVariant.SAMPLE
        self._sets: list[frozenset[str]] = [frozenset()]
        self._adapts = False

    def serving(self, key: StepKey, need: StepNeeds) -> Iterator[StepKey]:
        """The variants of a step that serve its needs, smallest first: any compiled one will do."""
        full = StepVariant.FULL
        for adapts in (True,) if key.adapts else (False, True):
            one = replace(key, adapts=adapts)
            for variant in StepVariant:
                if need.variant <= variant < full:
                    yield replace(one, variant=variant, names=frozenset())
            for names in (*(names for names in self._sets if names >= need.names), None):
                yield replace(one, variant=full, names=names)

    def to_compile(self, key: StepKey, need: StepNeeds) -> StepKey:
        """The variant to compile when none of these is compiled: it serves all needs so far."""
        self._largest = max(self._largest, need.variant)
        self._adapts |= key.adapts
        if not need.names <= self._sets[-1]:
            self._sets.append(self._sets[-1] | need.names)
        is_full = self._largest is StepVariant.FULL
        names = self._sets[-1] if is_full else frozenset[str]()
        return replace(key, variant=self._largest, names=names, adapts=self._adapts)
