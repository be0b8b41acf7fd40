"""The contract of plugins that support implementations that are not registered."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from enginebay.registry import Registry

PlanT = TypeVar("PlanT")


class ByHand(ABC, Generic[PlanT]):
    """Supports unregistered implementations: functions passed to `LLM.override`, and import paths
    ("package.module:attribute") in place of the names of kernels.

    A plugin registers an instance as kind "by_hand". PlanT is
    `enginebay.compose.composition.Plan`.
    """

    @abstractmethod
    def with_paths(
        self, registry: Registry, paths: Sequence[tuple[str, str]], layout: str
    ) -> Registry:
        """Return `registry` with the given pairs (op, import path) added as kernels. ConfigError
        for a path that cannot be imported.
        """

    @abstractmethod
    def overridden(self, plan: PlanT, given: Mapping[str, Any], *, check: bool) -> PlanT:
        """Return `plan` with other implementations, for `LLM.override` and `Engine.swap`. `given`
        maps an op to an implementation or to a dict of implementations by phase, or a setting such
        as "attention.decode" to an implementation. With `check` they are checked.
        """


def by_hand(registry: Registry) -> ByHand[Any]:
    """Return the registered ByHand with the highest priority; UnsupportedError if none exists."""
    entry = registry.first(
        "by_hand",
        "an implementation that is not registered, but no plugin supports these",
        "the name of a registered implementation",
        "List registered kernels with `enginebay plugins --kind kernel`, and pass a name.",
    )
    found: ByHand[Any] = registry.load(entry)
    return found
