"""The contract of plugins that support implementations that are not registered."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, Protocol, TypeVar

from enginebay.errors import EnginebayError
from enginebay.ops.select import is_import_path
from enginebay.plugins.registry import Registry

PlanT = TypeVar("PlanT")
ComposedT = TypeVar("ComposedT")


class EngineDriver(Protocol):
    """What drives an engine: a loop, or a service that starts a loop when it needs one."""

    @property
    def num_waiting(self) -> int:
        """Requests that have no row."""

    @property
    def num_running(self) -> int:
        """Requests that have a row."""

    def call(self, function: Callable[[], Any]) -> Any:
        """Run a function between steps, and return its result. StoppedError when the step before it
        failed.
        """

    def end_all(self, error: EnginebayError) -> None:
        """End every request with an error. Only called between steps."""


class ByHand(ABC, Generic[PlanT, ComposedT]):
    """Supports unregistered implementations: functions passed to `LLM.override`, and import paths
    ("package.module:attribute") in place of the names of kernels.

    A plugin registers an instance as kind "by_hand". PlanT and
    ComposedT are Plan and Composed of `enginebay.compose.composition`.
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
        """Return `plan` with other implementations, for `Engine.swap`. `given` maps an op to an
        implementation or to a dict of implementations by phase, or a setting such as
        "attention.decode" to an implementation. With `check` they are checked.
        """

    @abstractmethod
    def block(
        self, parts: ComposedT, driver: EngineDriver, given: Mapping[str, Any], *, check: bool
    ) -> AbstractContextManager[ComposedT]:
        """Run the engine's steps with other implementations while the block lasts, for
        `LLM.override`. Yields the engine's parts with the changed plan.

        RequestError while requests are running or waiting, and the errors of `overridden`; in all
        these cases nothing changes.
        """


def by_hand(registry: Registry) -> ByHand[Any, Any]:
    """Return the registered ByHand with the highest priority; UnsupportedError if none exists."""
    entry = registry.first(
        "by_hand",
        "an implementation that is not registered, but no plugin supports these",
        "the name of a registered implementation",
        "List registered kernels with `enginebay plugins --kind kernel`, and pass a name.",
    )
    found: ByHand[Any, Any] = registry.load(entry)
    return found


def with_paths_of(
    registry: Registry, ops: Sequence[str], names: Sequence[str], layout: str
) -> Registry:
    """Return `registry` with those of `names` that are import paths as kernels of each of `ops`;
    the others name registered kernels. ConfigError for a path that cannot be imported.
    """
    paths = [(op, name) for op in ops for name in names if is_import_path(name)]
    return by_hand(registry).with_paths(registry, paths, layout) if paths else registry
