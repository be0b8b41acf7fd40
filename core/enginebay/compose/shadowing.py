"""Choosing what shadow mode runs beside the chosen kernels: a candidate for attention, and the
phases that it can serve.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from enginebay.compose.binding import OpsBinder
from enginebay.compose.candidates import candidates
from enginebay.compose.import_paths import with_import_paths
from enginebay.compose.kernels import ChosenKernels
from enginebay.compose.negotiate import why_not
from enginebay.config import EngineConfig, Reason
from enginebay.config_sections import PHASES
from enginebay.engine import AttentionProblem
from enginebay.errors import UnsupportedError, explain, unknown_name
from enginebay.model import ModelInfo
from enginebay.ops.select import Candidate
from enginebay.registry import Registry
from enginebay.runner.shadow import ShadowParts
from enginebay.runner.sharding import Placement


@dataclasses.dataclass(frozen=True)
class ChosenShadow:
    """The candidate in the place of the chosen attention, the phases in which it is compared, and
    why not in others.
    """

    name: str
    share: float
    kernels: ChosenKernels
    phases: tuple[str, ...]
    reason: Reason

    def parts(self, chosen: ChosenKernels, info: ModelInfo, placement: Placement) -> ShadowParts:
        """What the runner makes of it."""
        return ShadowParts(
            self.name,
            self.share,
            OpsBinder(self.kernels, info, placement),
            self.kernels.compact_decode,
            {phase: chosen.names[f"attention.{phase}"] for phase in self.phases},
        )


def choose_shadow(
    registry: Registry,
    config: EngineConfig,
    kernels: ChosenKernels,
    info: ModelInfo,
    placement: Placement,
) -> ChosenShadow | None:
    """The shadow that `config` asks for, or None. It is not checked first: how wrong it is, is what
    it will tell.

    UnknownNameError for a name that nobody has, UnsupportedError for a candidate that can serve no
    phase here.
    """
    choice = config.shadow.get("attention")
    if choice is None:
        return None
    extended = with_import_paths(registry, config, kernels.layout, ("attention", choice.name))
    found = _find(candidates(extended, "attention", kernels.env), choice.name)
    shards = placement.num_shards("kv_heads")
    specs = {group: spec.per_shard(shards) for group, spec in info.attention.items()}
    refused: dict[str, str] = {}
    for phase in PHASES:
        reason = found.unavailable or why_not(
            found.impl,
            env=kernels.env,
            specs=specs,
            phase=phase,
            problems=_problems(kernels, found),
            is_sharded=shards > 1,
        )
        if reason is not None:
            refused[phase] = reason
    phases = tuple(phase for phase in PHASES if phase not in refused)
    if not phases:
        raise UnsupportedError(
            explain(
                f"shadow.attention = {choice.name!r} cannot be used here ({refused['decode']})",
                f"one that serves this model on layout {kernels.layout}",
                "Choose another candidate, or the layout that it has.",
            )
        )
    attention: dict[str, Any] = dict.fromkeys(phases, found.impl)
    shadowed = dataclasses.replace(kernels, attention={**kernels.attention, **attention})
    why = f"on {choice.share:g} of the steps, in {', '.join(phases)}"
    told = Reason("shadow.attention", choice.name, why, tuple(refused.items()))
    return ChosenShadow(choice.name, choice.share, shadowed, phases, told)


def _problems(kernels: ChosenKernels, candidate: Candidate) -> Sequence[AttentionProblem]:
    """The engine's steps on a copy of the rows' pages: of the engine's own size, or one page a row
    if it asks for that.
    """
    chosen = kernels.attention["decode"].caps
    return kernels.steps(
        dataclasses.replace(chosen, compact_decode=candidate.impl.caps.compact_decode)
    )


def _find(able: Sequence[Candidate], name: str) -> Candidate:
    for candidate in able:
        if candidate.name == name:
            return candidate
    names = [candidate.name for candidate in able]
    raise unknown_name(
        "kernel of op attention", name, names, "`enginebay plugins` lists what is installed."
    )
