"""Choosing the candidate of shadow mode, and the phases in which it is compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from enginebay.compose.binding import OpsBinder
from enginebay.compose.candidates import candidates
from enginebay.compose.import_paths import refuse_uncallable, with_import_paths
from enginebay.compose.kernels import ChosenKernels, import_paths_in
from enginebay.compose.ops import ATTENTION
from enginebay.compose.plan import Plan
from enginebay.config import EngineConfig, Reason
from enginebay.config_sections import PHASES, ShadowChoice
from enginebay.contracts.executor import ShadowParts
from enginebay.contracts.model import ModelInfo
from enginebay.contracts.placement import Placement
from enginebay.errors import UnsupportedError, unknown_name
from enginebay.ops.select import Candidate, is_import_path
from enginebay.plugins.registry import Registry


@dataclasses.dataclass(frozen=True)
class ChosenShadow:
    """The chosen kernels with the candidate in place of the op's implementation, the phases in
    which it is compared, and the reasons why not in the others.
    """

    op: str
    name: str
    share: float
    kernels: ChosenKernels
    phases: tuple[str, ...]
    reason: Reason

    def parts(self, chosen: ChosenKernels, info: ModelInfo, placement: Placement) -> ShadowParts:
        """The ShadowParts for the runner."""
        return ShadowParts(
            self.op,
            self.name,
            self.share,
            OpsBinder(self.kernels, info, placement),
            self.kernels.attention["decode"].caps.compact_decode,
            {
                phase: chosen.names.get(f"{self.op}.{phase}") or chosen.names[self.op]
                for phase in self.phases
            },
        )


def with_shadow(plan: Plan) -> Plan:
    """The plan with the shadow that its configuration asks for."""
    info, placement = plan.model.info, plan.placement
    found = choose_shadow(plan.registry, plan.config, plan.kernels, info, placement)
    if found is None:
        return plan
    parts = found.parts(plan.kernels, info, placement)
    return dataclasses.replace(plan, shadow=parts, reasons=(*plan.reasons, found.reason))


def choose_shadow(
    registry: Registry,
    config: EngineConfig,
    kernels: ChosenKernels,
    info: ModelInfo,
    placement: Placement,
) -> ChosenShadow | None:
    """The shadow that `config` asks for, or None. The candidate is not checked first: shadow mode
    reports how wrong it is.

    UnknownNameError for a name that is not registered, UnsupportedError for a candidate that can
    serve no phase of this model here.
    """
    for op, choice in config.shadow.items():
        if op == ATTENTION:
            return _choose_attention(registry, config, kernels, choice)
        return _choose_plain(registry, config, kernels, op, choice)
    return None


def _choose_plain(
    registry: Registry,
    config: EngineConfig,
    kernels: ChosenKernels,
    op: str,
    choice: ShadowChoice,
) -> ChosenShadow:
    if op not in kernels.plain:
        raise unknown_name(
            "op to shadow", op, [ATTENTION, *kernels.plain], "Set shadow for one of these."
        )
    extended = _extended(registry, config, kernels, (op, choice.name))
    is_sharded = kernels.is_sharded and not kernels.ops[op].partition
    able = candidates(
        extended,
        op,
        kernels.env,
        is_sharded=is_sharded,
        layout=kernels.layout,
        needs=kernels.needs_of(op),
    )
    found = _find(able, op, choice.name)
    what = f"shadow.{op} = {choice.name!r}"
    if found.unavailable is not None:
        given = f"{what} cannot be used here ({found.unavailable})"
        raise UnsupportedError(
            given,
            "a kernel that can run here",
            "List kernels with `enginebay plugins --kind kernel`.",
        )
    refuse_uncallable(kernels.ops[op], found.impl, what)
    shadowed = dataclasses.replace(kernels, plain={**kernels.plain, op: found.impl})
    reason = Reason(f"shadow.{op}", choice.name, f"on {choice.share:g} of the steps")
    return ChosenShadow(op, choice.name, choice.share, shadowed, PHASES, reason)


def _choose_attention(
    registry: Registry, config: EngineConfig, kernels: ChosenKernels, choice: ShadowChoice
) -> ChosenShadow:
    extended = _extended(registry, config, kernels, (ATTENTION, choice.name))
    found = _find(candidates(extended, ATTENTION, kernels.env), ATTENTION, choice.name)
    refused: dict[str, str] = {}
    for phase in PHASES:
        why_not = found.unavailable or kernels.why_not(
            found.impl, phase, kernels.problems(found.impl)
        )
        if why_not is not None:
            refused[phase] = why_not
    phases = tuple(phase for phase in PHASES if phase not in refused)
    if not phases:
        raise UnsupportedError(
            f"shadow.attention = {choice.name!r} cannot be used here ({refused['decode']})",
            f"a kernel that serves this model on layout {kernels.layout}",
            "Set another candidate, or pass --layout with the candidate's layout.",
        )
    attention: dict[str, Any] = dict.fromkeys(phases, found.impl)
    shadowed = dataclasses.replace(kernels, attention={**kernels.attention, **attention})
    why = f"on {choice.share:g} of the steps, in {', '.join(phases)}"
    reason = Reason("shadow.attention", choice.name, why, tuple(refused.items()))
    return ChosenShadow(ATTENTION, choice.name, choice.share, shadowed, phases, reason)


def _extended(
    registry: Registry, config: EngineConfig, kernels: ChosenKernels, candidate: tuple[str, str]
) -> Registry:
    """The registry with the import paths of a configuration, and the candidate's if it is an import
    path.
    """
    more = [candidate] if is_import_path(candidate[1]) else []
    paths = list(dict.fromkeys([*import_paths_in(config), *more]))
    return with_import_paths(registry, paths, kernels.layout) if paths else registry


def _find(able: Sequence[Candidate], op: str, name: str) -> Candidate:
    for candidate in able:
        if candidate.name == name:
            return candidate
    names = [candidate.name for candidate in able]
    raise unknown_name(
        f"kernel of op {op}", name, names, "List kernels with `enginebay plugins --kind kernel`."
    )
