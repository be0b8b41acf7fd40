"""The part `functions` of kind "by_hand"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from enginebay.compose.by_hand import ByHand, EngineDriver
from enginebay.compose.composition import Composed
from enginebay.compose.import_paths import with_import_paths
from enginebay.compose.override import overridden_plan
from enginebay.compose.override_block import overridden
from enginebay.compose.plan import Plan
from enginebay.plugins.registry import Registry


class Functions(ByHand[Plan, Composed]):
    """Applies functions, objects and import paths."""

    def with_paths(
        self, registry: Registry, paths: Sequence[tuple[str, str]], layout: str
    ) -> Registry:
        return with_import_paths(registry, paths, layout)

    def block(
        self, parts: Composed, driver: EngineDriver, given: Mapping[str, Any], *, check: bool
    ) -> AbstractContextManager[Composed]:
        return overridden(parts, driver, given, check=check)

    def overridden(self, plan: Plan, given: Mapping[str, Any], *, check: bool) -> Plan:
        return overridden_plan(plan, _by_op(given), check=check)


def _by_op(given: Mapping[str, Any]) -> dict[str, Any]:
    """Collect the parts of one op: those of settings such as "attention.decode" by their phase."""
    found: dict[str, Any] = {}
    for setting, part in given.items():
        op, _, phase = setting.partition(".")
        found[op] = {**found.get(op, {}), phase: part} if phase else part
    return found


GIVEN = Functions()
