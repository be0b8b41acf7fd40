"""The part `functions` of kind "by_hand"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from enginebay.compose.by_hand import ByHand
from enginebay.compose.plan import Plan
from enginebay.config import Reason
from enginebay.ops.op import CheckSetting, Op
from enginebay.registry import Registry
from enginebay_byhand.import_paths import check_import_paths, with_import_paths
from enginebay_byhand.override import overridden_plan


class Functions(ByHand[Plan]):
    """Checks and applies functions, objects and import paths."""

    def with_paths(
        self, registry: Registry, paths: Sequence[tuple[str, str]], layout: str
    ) -> Registry:
        return with_import_paths(registry, paths, layout)

    def checked(
        self,
        reasons: Sequence[Reason],
        impls: Mapping[str, Any],
        ops: Mapping[str, Op[Any]],
        setting: CheckSetting,
        *,
        verify: bool,
    ) -> tuple[Reason, ...]:
        return check_import_paths(reasons, impls, ops, setting, verify=verify)

    def overridden(self, plan: Plan, given: Mapping[str, Any], *, check: bool) -> Plan:
        return overridden_plan(plan, given, check=check)


GIVEN = Functions()
