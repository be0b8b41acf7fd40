"""Choosing what shadow mode runs beside the chosen kernels: a candidate for an op, and the phases
that it can serve.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from enginebay.compose.binding import OpsBinder
from enginebay.compose.candidates import candidates
from enginebay.compose.import_paths import refuse_uncallable, with_import_paths
from enginebay.compose.kernels import ChosenKernels
from enginebay.compose.negotiate import why_not
from enginebay.compose.ops import ATTENTION
from enginebay.config import EngineConfig, Reason
from enginebay.config_sections import PHASES, ShadowChoice
from enginebay.engine import AttentionProblem
from enginebay.errors import UnsupportedError, unknown_name
from enginebay.executor.parts import ShadowParts
from enginebay.executor.sharding import Placement
from enginebay.model import ModelInfo
from enginebay.ops.select import Candidate
from enginebay.registry import Registry


@dataclasses.dataclass(frozen=True)
class ChosenShadow:
    """The candidate in the place of the op's chosen implementation, the phases in which it is
    compared, and why not in others.
    """

    op: str
    name: str
    share: float
    kernels: ChosenKernels
    phases: tuple[str, ...]
    reason: Reason

    def parts(self, chosen: ChosenKernels, info: ModelInfo, placement: Placement) -> ShadowParts:
        """What the runner makes of it."""
        return ShadowParts(
            self.op,
            self.name,
            self.share,
            OpsBinder(self.kernels, info, placement),
            self.kernels.compact_decode,
            {
                phase: chosen.names.get(f"{self.op}.{phase}") or chosen.names[self.op]
                for phase in self.phases
            },
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
    for op, choice in config.shadow.items():
        if op == ATTENTION:
            return _choose_attention(registry, config, kernels, info, placement, choice)
        return _choose_plain(registry, config, kernels, placement, op, choice)
    return None


def _choose_plain(
    registry: Registry,
    config: EngineConfig,
    kernels: ChosenKernels,
    placement: Placement,
    op: str,
    choice: ShadowChoice,
) -> ChosenShadow:
    if op not in kernels.plain:
        raise unknown_name("op to shadow", op, [ATTENTION, *kernels.plain], "Name one of these.")
    extended = with_import_paths(registry, config, kernels.layout, (op, choice.name))
    is_sharded = placement.num_shards("kv_heads") > 1 and not kernels.ops[op].partition
    able = candidates(extended, op, kernels.env, is_sharded=is_sharded, layout=kernels.layout)
    found = _find(able, op, choice.name)
    what = f"shadow.{op} = {choice.name!r}"
    if found.unavailable is not None:
        given = f"{what} cannot be used here ({found.unavailable})"
        raise UnsupportedError(given, "one that can serve here", "Choose another.")
    refuse_uncallable(kernels.ops[op], found.impl, what)
    shadowed = dataclasses.replace(kernels, plain={**kernels.plain, op: found.impl})
    reason = Reason(f"shadow.{op}", choice.name, f"on {choice.share:g} of the steps")
    return ChosenShadow(op, choice.name, choice.share, shadowed, PHASES, reason)


def _choose_attention(
    registry: Registry,
    config: EngineConfig,
    kernels: ChosenKernels,
    info: ModelInfo,
    placement: Placement,
    choice: ShadowChoice,
) -> ChosenShadow:
    extended = with_import_paths(registry, config, kernels.layout, (ATTENTION, choice.name))
    found = _find(candidates(extended, ATTENTION, kernels.env), ATTENTION, choice.name)
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
            f"shadow.attention = {choice.name!r} cannot be used here ({refused['decode']})",
            f"one that serves this model on layout {kernels.layout}",
            "Choose another candidate, or the layout that it has.",
        )
    attention: dict[str, Any] = dict.fromkeys(phases, found.impl)
    shadowed = dataclasses.replace(kernels, attention={**kernels.attention, **attention})
    why = f"on {choice.share:g} of the steps, in {', '.join(phases)}"
    told = Reason("shadow.attention", choice.name, why, tuple(refused.items()))
    return ChosenShadow(ATTENTION, choice.name, choice.share, shadowed, phases, told)


def _problems(kernels: ChosenKernels, candidate: Candidate) -> Sequence[AttentionProblem]:
    """The engine's steps on a copy of the rows' pages: of the engine's own size, or one page a row
    if it asks for that.
    """
    chosen = kernels.attention["decode"].caps
    return kernels.steps(
        dataclasses.replace(chosen, compact_decode=candidate.impl.caps.compact_decode)
    )


def _find(able: Sequence[Candidate], op: str, name: str) -> Candidate:
    for candidate in able:
        if candidate.name == name:
            return candidate
    names = [candidate.name for candidate in able]
    raise unknown_name(
        f"kernel of op {op}", name, names, "`enginebay plugins` lists what is installed."
    )
