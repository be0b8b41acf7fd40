"""Checks kernels that were chosen by import path, and writes the results into a plan's reasons."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

from enginebay.compose.import_paths import BY_PATH, refuse_uncallable
from enginebay.compose.kernels import ChosenKernels
from enginebay.compose.ops import ATTENTION
from enginebay.compose.plan import Plan
from enginebay.compose.quick_cases import CheckSetting
from enginebay.compose.quick_check import quick_checked
from enginebay.config import Reason
from enginebay.config_sections import PHASES
from enginebay.errors import ConfigError
from enginebay.ops.select import is_import_path
from enginebay.ops.spec import Mode

SWITCH = "verify_kernels = false, or --no-verify-kernels"


def check_import_paths(plan: Plan) -> Plan:
    """Check the implementations of a plan that were chosen by import path, and return the plan with
    the results in its reasons; IncorrectError when a check fails.
    """
    replaced = {
        reason.setting: _checked(plan, reason)
        for reason in plan.kernels.reasons
        if is_import_path(reason.chosen)
    }
    return with_reasons(plan, replaced) if replaced else plan


def _checked(plan: Plan, reason: Reason) -> Reason:
    kernels = plan.kernels
    _, name, *phase = reason.setting.split(".")
    impl: Any = kernels.plain.get(name)
    if name == ATTENTION:
        impl = kernels.attention[cast("Mode", phase[0])]
    else:
        what = f"kernel of op {name} {reason.chosen!r}"
        refuse_uncallable(kernels.ops[name], impl, what, ConfigError)
    how = "not checked"
    if plan.config.verify_kernels:
        setting = check_setting(kernels, [p for p in PHASES if p in phase or not phase])
        what = f"{reason.setting} = {reason.chosen!r}"
        how = quick_checked(kernels.ops[name], impl, setting, what, SWITCH)
    return dataclasses.replace(reason, why=f"{BY_PATH}, {how}")


def check_setting(kernels: ChosenKernels, phases: Sequence[Mode]) -> CheckSetting:
    """Return the setting in which quick checks run an implementation: the specs of the model's
    layers, on the smallest pages of the engine.
    """
    specs = list(kernels.specs.values())
    dtype = specs[0].q_dtype
    setting = CheckSetting(kernels.env, specs, kernels.layout_type, dtype, phases)
    return dataclasses.replace(setting, page_size=kernels.smallest_page or setting.page_size)


def with_reasons(
    plan: Plan, replaced: Mapping[str, Reason], kernels: ChosenKernels | None = None
) -> Plan:
    """Return a plan with other reasons by setting, and with other kernels if they are given."""
    kernels = kernels or plan.kernels
    changed = dataclasses.replace(kernels, reasons=_replaced(kernels.reasons, replaced))
    return dataclasses.replace(plan, kernels=changed, reasons=_replaced(plan.reasons, replaced))


def _replaced(reasons: Sequence[Reason], replaced: Mapping[str, Reason]) -> tuple[Reason, ...]:
    return tuple(replaced.get(reason.setting, reason) for reason in reasons)
