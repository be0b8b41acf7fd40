"""Chooses the implementations of all ops for a model and its engine."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from enginebay.compose.candidates import NOTHING, candidates, interpreted_names
from enginebay.compose.fused import FusedPart, choose_fused
from enginebay.compose.import_paths import with_import_paths
from enginebay.compose.negotiate import (
    PlanSteps,
    StepsFor,
    choose_attention,
    choose_layout,
    why_not_phase,
)
from enginebay.compose.ops import ATTENTION, NONE, usable_ops
from enginebay.compose.tuned_files import load_tuned
from enginebay.config import EngineConfig, Reason
from enginebay.config_sections import AUTO, PHASES, KernelChoice
from enginebay.contracts.cache import KVLayout
from enginebay.contracts.engine import AttentionProblem
from enginebay.contracts.model import ModelInfo
from enginebay.contracts.placement import Placement
from enginebay.errors import ConfigError, UnsupportedError, unknown_name
from enginebay.ops.bound import AttentionImpl
from enginebay.ops.caps import Caps, Env, SkipsPadding
from enginebay.ops.grouped_linear import GROUPED_LINEAR
from enginebay.ops.linear import LINEAR
from enginebay.ops.op import Op
from enginebay.ops.select import Candidate, choose, is_import_path
from enginebay.ops.spec import AttnSpec, Mode
from enginebay.ops.tuned_tables import TunedConfigs
from enginebay.plugins.registry import Registry

PRODUCTS = (LINEAR.name, GROUPED_LINEAR.name)
"""The ops that multiply the rows of a step with weights."""


def no_steps(decode: Caps) -> Sequence[AttentionProblem]:
    """Return no problems, for kernels that are used without an engine."""
    return ()


@dataclasses.dataclass(frozen=True)
class ChosenKernels:
    """The chosen implementations: attention by phase, all other ops, and the cache layout that the
    attention implementations share.

    `plain` contains a fused op only if one implementation computes it; otherwise it contains the
    parts of the fused op.
    """

    attention: Mapping[str, AttentionImpl]
    plain: Mapping[str, Any]
    names: Mapping[str, str]
    layout: str
    layout_type: type[KVLayout]
    reasons: tuple[Reason, ...]
    env: Env
    custom_calls: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    """Names of the functions outside XLA that the implementations call, and "module:function" of
    what registers them; None: they are registered when the implementation is loaded.
    """
    ops: Mapping[str, Op[Any]] = dataclasses.field(default_factory=dict)
    """The usable registered ops, by name."""
    tuned: TunedConfigs = dataclasses.field(default_factory=TunedConfigs)
    """The tuned configurations; an implementation's default is used where there is none."""

    steps: StepsFor = no_steps
    """Returns the attention problems of the engine's steps for the capabilities of a decode kernel.
    """
    free_padding_rows: int = 0
    """The largest number of rows for which all products skip padding (`SkipsPadding`)."""
    specs: Mapping[str, AttnSpec] = dataclasses.field(default_factory=dict)
    """The attention spec of each cache group on one shard."""
    is_sharded: bool = False
    needs: Mapping[str, Collection[str]] = dataclasses.field(default_factory=dict)
    """What kernels that read weights must support (`WeightFormat.needs`)."""

    def needs_of(self, op: str) -> Mapping[str, Collection[str]]:
        """Return what a kernel of an op must support for the weights and the cache."""
        return kernel_needs(self.ops[op], self.ops, self.needs, self.specs)

    def problems(self, decode: AttentionImpl | None = None) -> Sequence[AttentionProblem]:
        """Return the attention problems of the engine's steps. `decode`: another kernel for decode
        steps, whose capabilities do not change the sizes of the steps.
        """
        caps = self.attention["decode"].caps
        if decode is not None:
            caps = dataclasses.replace(caps, compact_decode=decode.caps.compact_decode)
        return self.steps(caps)

    def why_not(
        self, impl: AttentionImpl, phase: Mode, problems: Sequence[AttentionProblem]
    ) -> str | None:
        """Return why an implementation of attention cannot run the problems of a phase, or None."""
        sharded = self.is_sharded
        return why_not_phase(impl, phase, problems, self.env, self.specs, is_sharded=sharded)

    @property
    def smallest_page(self) -> int | None:
        """Number of tokens in the engine's smallest page; None for kernels without an engine."""
        sizes = [layout.page_size for _, layouts in self.problems() for layout in layouts.values()]
        return min(sizes, default=None)


def choose_kernels(
    registry: Registry,
    config: EngineConfig,
    env: Env,
    info: ModelInfo,
    placement: Placement,
    default_layout: str,
    steps: PlanSteps,
    needs: Mapping[str, Collection[str]] = NOTHING,
) -> ChosenKernels:
    """Choose an implementation for every op, and the cache layout.

    UnsupportedError, with the reason, for an implementation chosen by name that cannot be used
    here; UnknownNameError for an unknown op or name. `steps` computes the attention problems of the
    engine's steps, with the engine's pages, rows and context lengths. `needs`: what kernels that
    read weights must support (`WeightFormat.needs`).
    """
    ops, refused = usable_ops(registry)
    known = [*ops, *(reason.setting.removeprefix("kernels.") for reason in refused)]
    for op in config.kernels:
        if op not in known:
            todo = "Correct the name of the op in --kernel OP=NAME, or in the [kernels] section."
            raise unknown_name("op", op, known, todo)
    paths = import_paths_in(config)
    if paths:
        registry = with_import_paths(registry, paths, default_layout)
    shards = placement.num_shards("kv_heads")
    specs = {group: spec.per_shard(shards) for group, spec in info.attention.items()}
    layout = choose_layout(registry, config, env, specs, default_layout)
    layout_type = registry.load(registry.find("layout", layout.chosen))
    tuned = load_tuned(registry, config.tuned, config.tuned_folder)
    plain, why_plain = _choose_plain(
        registry, config, env, ops, layout.chosen, specs, is_sharded=shards > 1, needs=needs
    )
    dtypes = {"dtypes": {config.weight_dtype, config.dtype}}
    free = min(_free_padding_rows(plain, op, {**needs, **dtypes}) for op in PRODUCTS)
    steps_for = functools.partial(steps, layout.chosen, layout_type, free)
    attention, why = choose_attention(
        registry, config, env, specs, steps_for, tuned, is_sharded=shards > 1
    )
    reasons = [layout, *why, *why_plain, *refused]
    calls = {
        call: one.register_call
        for one in (*attention.values(), *plain.values())
        for call in one.custom_calls
    }
    chosen = ChosenKernels(
        attention={phase: found.impl for phase, found in attention.items()},
        plain={op: found.impl for op, found in plain.items()},
        names={r.setting.removeprefix("kernels."): r.chosen for r in reasons},
        layout=layout.chosen,
        layout_type=layout_type,
        reasons=tuple(reasons),
        env=env,
        custom_calls=calls,
        ops=ops,
        tuned=tuned,
        steps=steps_for,
        free_padding_rows=free,
        specs=specs,
        is_sharded=shards > 1,
        needs=needs,
    )
    writers = {op: wanted_kernel(config, op) for op in ops[ATTENTION].writers}
    named = {op: f"kernels.{op} = {name!r}" for op, name in writers.items() if name != AUTO}
    refuse_unused(named, ops, chosen.attention)
    return chosen


def kernel_needs(
    op: Op[Any],
    ops: Mapping[str, Op[Any]],
    weights: Mapping[str, Collection[str]],
    specs: Mapping[str, AttnSpec],
) -> Mapping[str, Collection[str]]:
    """Return what the capabilities of a kernel of the op must name: what the weights need, or the
    storages of the cache groups if the op writes the cache.
    """
    if op.name in ops[ATTENTION].writers:
        return {"storages": {spec.kv_storage for spec in specs.values() if spec.kv_storage}}
    return weights if op.reads_weights else NOTHING


def import_paths_in(config: EngineConfig) -> list[tuple[str, str]]:
    """Return pairs (op, path) for the kernels that a configuration chooses by import path."""
    choices = config.kernels.items()
    named = [(op, getattr(choice, phase)) for op, choice in choices for phase in PHASES]
    return list(dict.fromkeys(pair for pair in named if is_import_path(pair[1])))


def refuse_unused(
    named: Mapping[str, str], ops: Mapping[str, Op[Any]], attention: Mapping[str, AttentionImpl]
) -> None:
    """Raise UnsupportedError for an op in `named` that writes the cache, when attention writes the
    cache itself in every phase, so that the op would never run. The values of `named` are texts for
    the error message.
    """
    writers = [op for op in ops[ATTENTION].writers if op in named]
    if writers and all(map(writes_cache, attention.values())):
        given = f"{named[writers[0]]}, but attention writes the cache itself in all phases"
        allowed = "attention without the feature fused_write in some phase"
        todo = f"Choose another attention with --attention, or leave {writers[0]} out."
        raise UnsupportedError(given, allowed, todo)


def _choose_plain(
    registry: Registry,
    config: EngineConfig,
    env: Env,
    ops: Mapping[str, Op[Any]],
    layout: str,
    specs: Mapping[str, AttnSpec],
    *,
    is_sharded: bool,
    needs: Mapping[str, Collection[str]],
) -> tuple[dict[str, Candidate], list[Reason]]:
    """Choose every op without phases. A fused op is left out if its parts compute it."""
    plain: dict[str, Candidate] = {}
    reasons = []
    others = [(name, op) for name, op in ops.items() if name != ATTENTION]
    for name, op in sorted(others, key=lambda pair: bool(pair[1].made_of)):  # fused ops last
        wanted, setting = wanted_kernel(config, name), f"kernels.{name}"
        able = candidates(
            registry,
            name,
            env,
            # The partition rule of an op can split any kernel, but only kernels chosen by name use
            # it: "auto" takes none whose speed was not measured when split.
            is_sharded=is_sharded and not (op.partition and wanted != AUTO),
            layout=layout,
            needs=kernel_needs(op, ops, needs, specs),
            interpret=interpreted_names(config, wanted),
        )
        parts = [
            FusedPart(part, plain[part], is_named=wanted_kernel(config, part) != AUTO)
            for part in op.made_of
            if part in plain
        ]
        found: Candidate | None
        try:
            choosing = choose_fused(setting, wanted, able, parts) if op.made_of else None
            found, why = choosing or choose(setting, wanted, able)
        except UnsupportedError as error:
            if op.made_of or wanted != AUTO or registry.find("op", name).built_in:
                raise
            found, why = None, Reason(setting, NONE, str(error))
        reasons.append(why)
        if found is not None:
            plain[name] = found
    return plain, reasons


def _free_padding_rows(
    plain: Mapping[str, Candidate], op: str, needs: Mapping[str, Collection[str]]
) -> int:
    impl = plain[op].impl if op in plain else None
    return impl.free_padding_rows(needs) if isinstance(impl, SkipsPadding) else 0


def wanted_kernel(config: EngineConfig, op: str) -> str:
    """Return the configured name for an op without phases."""
    choice = config.kernels.get(op, KernelChoice())
    if len(set(choice.model_dump().values())) > 1:
        given = f"kernels.{op} differs by phase"
        todo = f"Pass a single name: --kernel {op}=NAME."
        raise ConfigError(given, "one name, because this op has no phases", todo)
    return choice.decode


def writes_cache(impl: AttentionImpl) -> bool:
    """Return whether an attention implementation writes the cache itself."""
    return "fused_write" in impl.caps.features
