"""The contract of what serves implementations that nobody registered."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

from enginebay.config import Reason
from enginebay.errors import UnsupportedError
from enginebay.ops.op import CheckSetting, Op
from enginebay.registry import Registry

PlanT = TypeVar("PlanT")


class ByHand(ABC, Generic[PlanT]):
    """Serves functions given to `LLM.override`, and import paths ("package.module:attribute") in
    the place of kernels' names. Of kind "by_hand"; PlanT is `enginebay.compose.composition.Plan`.
    """

    @abstractmethod
    def with_paths(
        self, registry: Registry, paths: Sequence[tuple[str, str]], layout: str
    ) -> Registry:
        """`registry` with these (op, import path) as kernels. ConfigError for one that cannot be
        imported.
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
        """The reasons, where import paths were chosen; IncorrectError when one fails its check.
        `impls` has the implementation of each setting, such as "kernels.attention.decode".
        """

    @abstractmethod
    def overridden(self, plan: PlanT, given: Mapping[str, Any], *, check: bool) -> PlanT:
        """`plan` with other implementations by op, for `LLM.override`."""


def by_hand(registry: Registry) -> ByHand[Any]:
    """The registered one. UnsupportedError when there is none."""
    able = registry.ready("by_hand")
    if not able:
        given = "an implementation that is not registered, and no plugin serves any"
        raise UnsupportedError(given, "the name of a registered one", "Name one.")
    found: ByHand[Any] = registry.load(able[0])
    return found


def by_op(parts: Mapping[str, object]) -> dict[str, object]:
    """Parts by setting, such as "attention.decode", as `ByHand.overridden` takes them."""
    found: dict[str, object] = {}
    for setting, part in parts.items():
        op, _, phase = setting.partition(".")
        if phase:
            cast("dict[str, object]", found.setdefault(op, {}))[phase] = part
        else:
            found[op] = part
    return found
