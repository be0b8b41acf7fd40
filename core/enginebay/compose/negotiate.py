"""Chooses attention kernels and the cache layout for the steps that the engine will run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

from enginebay.compose.candidates import candidates, interpreted_names
from enginebay.config import EngineConfig, Reason
from enginebay.config_sections import AUTO, PHASES, KernelChoice
from enginebay.contracts.cache import KVLayout
from enginebay.contracts.engine import AttentionProblem
from enginebay.errors import UnsupportedError, unknown_name
from enginebay.ops.bound import AttentionImpl
from enginebay.ops.caps import Caps, Env
from enginebay.ops.select import Candidate, choose, common_layout
from enginebay.ops.spec import AttnSpec, Mode
from enginebay.ops.tuned_tables import TunedConfigs
from enginebay.plugins.registry import Registry

PlanSteps = Callable[[str, type[KVLayout], int, Caps], Sequence[AttentionProblem]]
"""(name of the layout, layout class, `EngineParts.free_padding_rows`, capabilities of the decode
kernel) -> the attention problems of all steps of an engine.
"""

StepsFor = Callable[[Caps], Sequence[AttentionProblem]]
"""Capabilities of the decode kernel -> the attention problems, for the chosen layout and products.
"""


def why_not_phase(
    impl: AttentionImpl,
    phase: Mode,
    problems: Sequence[AttentionProblem],
    env: Env,
    specs: Mapping[str, AttnSpec],
    *,
    is_sharded: bool,
) -> str | None:
    """Return why an implementation cannot run the problems of a phase, or None.

    `specs`: the attention spec of each cache group on one shard. Every spec is checked with every
    problem of the phase, on the layout of its group.
    """
    for bucket, layouts in problems:
        if bucket.mode != phase:
            continue
        for group, spec in specs.items():
            local = dataclasses.replace(layouts[group], num_kv_heads=spec.num_kv_heads)
            reason = impl.caps.why_not(env, spec, bucket, local)
            if reason is not None:
                return reason
    if is_sharded and "shard_map" not in impl.caps.features:
        return "does not support features shard_map"
    return None


def choose_attention(
    registry: Registry,
    config: EngineConfig,
    env: Env,
    specs: Mapping[str, AttnSpec],
    steps: StepsFor,
    tuned: TunedConfigs,
    *,
    is_sharded: bool,
) -> tuple[dict[Mode, Candidate], list[Reason]]:
    """Choose the attention implementation of each phase. `specs`: the attention spec of each cache
    group on one shard.

    Decode is chosen first, because the capabilities of its kernel determine the sizes of all steps.
    """
    wanted = config.kernels.get("attention", KernelChoice())
    found: dict[Mode, Candidate] = {}
    reasons = []
    for phase in PHASES:
        name = getattr(wanted, phase)

        def refusal(impl: AttentionImpl, phase: Mode = phase) -> str | None:
            caps = found["decode"].impl.caps if "decode" in found else impl.caps
            return why_not_phase(impl, phase, steps(caps), env, specs, is_sharded=is_sharded)

        found[phase], why = choose(
            f"kernels.attention.{phase}",
            name,
            candidates(registry, "attention", env, interpret=interpreted_names(config, name)),
            refusal,
            functools.partial(
                tuned.faster_than, "attention", env=env, specs=list(specs.values()), mode=phase
            ),
        )
        reasons.append(why)
    return found, reasons


def choose_layout(
    registry: Registry, config: EngineConfig, env: Env, specs: Mapping[str, AttnSpec], default: str
) -> Reason:
    """Choose the cache layout: the configured one, or the first one that the attention kernels
    chosen by name share, or the default.
    """
    if config.layout != AUTO:
        return Reason("layout", config.layout, "chosen by name")
    wanted = config.kernels.get("attention", KernelChoice())
    named = {getattr(wanted, phase) for phase in PHASES} - {AUTO}
    interpret = interpreted_names(config, *named)
    # Two candidates may have one name; a broken one comes after the one that works.
    able = reversed(candidates(registry, "attention", env, interpret=interpret))
    found = {candidate.name: candidate for candidate in able}
    for name in sorted(named - set(found)):
        raise unknown_name(
            "kernel of op attention", name, found, "`enginebay plugins` lists what is installed."
        )
    lists = [
        found[name].impl.caps.layouts for name in sorted(named) if found[name].impl is not None
    ]
    if not lists:
        if any(spec.v_is_k_prefix for spec in specs.values()):
            for name in (default, *registry.names("layout")):
                if registry.load(registry.find("layout", name)).serves_v_prefix:
                    return Reason("layout", name, "supports values that are a prefix of keys")
        return Reason("layout", default, f"the default of platform {env.platform}")
    layout = common_layout(lists)
    if layout is None:
        raise UnsupportedError(
            f"attention kernels {', '.join(sorted(named))} share no cache layout",
            "kernels with a common layout",
            "Choose another kernel for one of the phases with --attention PHASE=NAME.",
        )
    return Reason("layout", layout, f"the first one that {', '.join(sorted(named))} share")
