"""The contract of plugins that support implementations that are not registered."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

from enginebay.config import Reason
from enginebay.ops.op import CheckSetting, Op
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
    def checked(
        self,
        reasons: Sequence[Reason],
        impls: Mapping[str, Any],
        ops: Mapping[str, Op[Any]],
        setting: CheckSetting,
        *,
        verify: bool,
    ) -> tuple[Reason, ...]:
        """Check the implementations that were chosen by import path, if `verify`; return the
        reasons with the result of the checks. IncorrectError when a check fails.

        impls: setting, such as "kernels.attention.decode" -> implementation.
        """

    @abstractmethod
    def overridden(self, plan: PlanT, given: Mapping[str, Any], *, check: bool) -> PlanT:
        """Return `plan` with other implementations, for `LLM.override`. `given` maps an op to an
        implementation, or to a dict of implementations by phase. With `check` they are checked.
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


def by_op(parts: Mapping[str, object]) -> dict[str, object]:
    """Convert parts by setting, such as "attention.decode", to the form of `ByHand.overridden`."""
    found: dict[str, object] = {}
    for setting, part in parts.items():
        op, _, phase = setting.partition(".")
        if phase:
            cast("dict[str, object]", found.setdefault(op, {}))[phase] = part
        else:
            found[op] = part
    return found
