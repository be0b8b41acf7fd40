"""Choosing the implementations of ops for a model, and binding them into what the model calls."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from enginebay.build.fused import FUSED_OPS, Part, add_rms_norm_of, choose_fused
from enginebay.build.tuned import load_tuned
from enginebay.build.unregistered import check_import_paths, with_import_paths
from enginebay.cache import CacheArrays, KVLayout
from enginebay.config import AUTO, PHASES, EngineConfig, KernelChoice, Reason
from enginebay.errors import ConfigError, PluginError, UnsupportedError, explain, unknown_name
from enginebay.model import ModelInfo
from enginebay.ops.bound import AttentionImpl, Ops
from enginebay.ops.caps import Env
from enginebay.ops.levels import Interpretable
from enginebay.ops.select import Candidate, choose, common_layout
from enginebay.ops.spec import AttnBatch, AttnSpec, Bucket, Mode, RopeSpec
from enginebay.ops.tuning import TunedConfigs
from enginebay.registry import Entry, Registry
from enginebay.runner.sharding import Placement
from enginebay.runner.step import Layouts
from enginebay.testing.quick import Setting

PLAIN_OPS = ("embedding", "linear", "rms_norm", "rope", "kv_write", "sample")
"""Ops without phases and layouts."""


@dataclasses.dataclass(frozen=True)
class ChosenKernels:
    """Attention per phase, the plain ops, and the layout that the attention implementations share.

    `plain` has a fused op only where one implementation computes it, not its parts.
    """

    attention: Mapping[str, AttentionImpl]
    plain: Mapping[str, Any]
    names: Mapping[str, str]
    layout: str
    layout_type: type[KVLayout]
    reasons: tuple[Reason, ...]
    env: Env
    custom_calls: tuple[str, ...] = ()
    """What they call outside XLA, as they declare it: functions that they make known to it when they are loaded."""
    tuned: TunedConfigs = dataclasses.field(default_factory=TunedConfigs)
    """Where configurations are looked up before an implementation's own default is taken."""

    def bound(self) -> dict[str, Any]:
        """The plain ops, each with the configurations that are tuned for it."""
        return {op: self.tuned.bound(op, impl, self.env) for op, impl in self.plain.items()}

    @property
    def compact_decode(self) -> bool:
        """Whether decode steps should run on a copy of the rows' cache."""
        return self.attention["decode"].caps.compact_decode

    @property
    def ragged_decode(self) -> bool:
        """Whether decode steps cost what their rows' lengths cost, whatever the bucket."""
        return self.attention["decode"].caps.ragged_decode


def candidates(
    registry: Registry,
    op: str,
    env: Env,
    *,
    is_sharded: bool = False,
    layout: str | None = None,
    interpret: Collection[str] = (),
) -> list[Candidate]:
    """Every registered implementation of an op, loaded where its declaration allows this platform.

    With `is_sharded` those that declare the capability sharded = False cannot serve, nor can those whose capability
    `layouts` lacks `layout`. Of the names in `interpret`, those that are made for another platform serve this one by
    interpretation.
    """
    kernels = [e for e in registry.entries if e.kind == "kernel" and e.op == op]
    unable = [why_not_declared(e, layout, is_sharded=is_sharded) for e in kernels]
    return [
        _candidate(registry, e, env, interpret=e.name in interpret)
        if reason is None
        else Candidate(e.name, 0, unavailable=reason)
        for e, reason in zip(kernels, unable, strict=True)
    ]


def why_not_declared(entry: Entry, layout: str | None, *, is_sharded: bool) -> str | None:
    """Why a kernel cannot serve here by what it declares, or None; whether it is there at all is not looked at."""
    known = {} if entry.declaration is None else entry.declaration.capabilities
    layouts = known.get("layouts")
    if is_sharded and known.get("sharded") is False:
        return "does not support weights split over devices"
    if layout is not None and layouts is not None and layout not in layouts:
        return f"does not support layout {layout} (has {', '.join(layouts)})"
    return None


def _candidate(registry: Registry, entry: Entry, env: Env, *, interpret: bool) -> Candidate:
    declared = entry.declaration
    if entry.state != "ready" or declared is None:
        return Candidate(entry.name, 0, unavailable=entry.reason)
    reason = entry.why_not_on(env.platform)
    if reason is not None and not interpret:
        return Candidate(entry.name, 0, unavailable=reason)
    try:
        impl = registry.load(entry)
        if reason is not None:
            if not isinstance(impl, Interpretable):
                return Candidate(
                    entry.name, 0, unavailable=f"{reason}, and it has no way of being interpreted"
                )
            impl = impl.interpreted()
    except PluginError as error:
        # One that finds on import that it cannot serve here says so itself.
        cause = error.__cause__ if isinstance(error.__cause__, UnsupportedError) else error
        return Candidate(entry.name, 0, unavailable=str(cause))
    except UnsupportedError as error:  # its interpreter is not installed
        return Candidate(entry.name, 0, unavailable=str(error))
    priority = getattr(impl, "priority", declared.capabilities.get("priority", 0))
    calls = tuple(declared.capabilities.get("custom_calls", ()))
    return Candidate(entry.name, int(priority), impl, custom_calls=calls, interpreted=reason is not None)


def _interpreted(config: EngineConfig, *names: str) -> set[str]:
    """Which of the wanted names may be interpreted; "auto" is none, so that it never takes such a kernel."""
    return set(names) - {AUTO} if config.interpret else set()


def choose_kernels(
    registry: Registry,
    config: EngineConfig,
    env: Env,
    info: ModelInfo,
    placement: Placement,
    default_layout: str,
) -> ChosenKernels:
    """Settle every op and the layout; an explicit name that cannot serve is an error with its reason."""
    known = {e.op for e in registry.entries if e.kind == "kernel"}
    for op in config.kernels:
        if op not in known:
            raise unknown_name("op", op, known, "Correct the [kernels] section.")
    registry = with_import_paths(registry, config, default_layout)
    shards = placement.num_shards("kv_heads")
    specs = [spec.per_shard(shards) for spec in info.attention.values()]
    layout, reason = _choose_layout(registry, config, env, specs, default_layout)
    attention: dict[str, AttentionImpl] = {}
    reasons = [reason]
    calls: set[str] = set()
    tuned = load_tuned(registry, config.tuned, config.tuned_folder)
    wanted = config.kernels.get("attention", KernelChoice())
    for phase in PHASES:
        found, why = choose(
            f"kernels.attention.{phase}",
            getattr(wanted, phase),
            candidates(registry, "attention", env, interpret=_interpreted(config, getattr(wanted, phase))),
            functools.partial(
                why_not, env=env, specs=specs, phase=phase, layout=layout, is_sharded=shards > 1
            ),
            functools.partial(_measured_faster, tuned, env, specs, phase),
        )
        attention[phase] = found.impl
        calls.update(found.custom_calls)
        reasons.append(why)
    plain, why_plain = _choose_plain(registry, config, env, layout.name, is_sharded=shards > 1)
    reasons += why_plain
    calls.update(call for found in plain.values() for call in found.custom_calls)
    names = {r.setting.removeprefix("kernels."): r.chosen for r in reasons}
    _refuse_unused(config, attention)
    impls = {op: found.impl for op, found in plain.items()}
    checked = {f"kernels.attention.{phase}": impl for phase, impl in attention.items()}
    checked |= {f"kernels.{op}": impl for op, impl in impls.items()}
    setting = Setting(env, specs, type(layout), specs[0].q_dtype)
    told = check_import_paths(reasons, checked, setting, verify=config.verify_kernels)
    return ChosenKernels(
        attention, impls, names, layout.name, type(layout), told, env, tuple(sorted(calls)), tuned
    )


def _refuse_unused(config: EngineConfig, attention: Mapping[str, AttentionImpl]) -> None:
    """UnsupportedError for a writer of the cache that is chosen by name where attention of every phase writes itself."""
    named = [op for op in ("kv_write", "rope_kv_write") if _wanted(config, op) != AUTO]
    if named and all(_writes(impl) for impl in attention.values()):
        given = f"kernels.{named[0]} = {_wanted(config, named[0])!r}, but attention writes the cache itself in all phases"
        fix = f"Choose such an attention kernel, or leave kernels.{named[0]} out."
        raise UnsupportedError(explain(given, "attention without the feature fused_write in some phase", fix))


def choose_plain(
    registry: Registry,
    config: EngineConfig,
    env: Env,
    op: str,
    *,
    is_sharded: bool = False,
    layout: str | None = None,
) -> tuple[Candidate, Reason]:
    """Settle one of PLAIN_OPS."""
    wanted = _wanted(config, op)
    may = _interpreted(config, wanted)
    able = candidates(registry, op, env, is_sharded=is_sharded, layout=layout, interpret=may)
    return choose(f"kernels.{op}", wanted, able, lambda _: None)


def _choose_plain(
    registry: Registry, config: EngineConfig, env: Env, layout: str, *, is_sharded: bool
) -> tuple[dict[str, Candidate], list[Reason]]:
    """Every op without phases; of the fused ones those that one implementation computes."""
    plain: dict[str, Candidate] = {}
    reasons = []
    for op in PLAIN_OPS:
        plain[op], why = choose_plain(registry, config, env, op, is_sharded=is_sharded, layout=layout)
        reasons.append(why)
    for op, made_of in FUSED_OPS.items():
        may = _interpreted(config, _wanted(config, op))
        able = candidates(registry, op, env, is_sharded=is_sharded, layout=layout, interpret=may)
        parts = [Part(part, plain[part], is_named=_wanted(config, part) != AUTO) for part in made_of]
        found, why = choose_fused(f"kernels.{op}", _wanted(config, op), able, parts)
        reasons.append(why)
        if found is not None:
            plain[op] = found
    return plain, reasons


def _wanted(config: EngineConfig, op: str) -> str:
    """The name that is configured for an op without phases."""
    choice = config.kernels.get(op, KernelChoice())
    if len(set(choice.model_dump().values())) > 1:
        given = f"kernels.{op} differs by phase"
        raise ConfigError(explain(given, "one name: this op has no phases", "Give a single name."))
    return choice.decode


def _measured_faster(
    tuned: TunedConfigs, env: Env, specs: Sequence[AttnSpec], phase: Mode, able: Sequence[AttentionImpl]
) -> tuple[Any, str] | None:
    return tuned.faster_than("attention", able[0], able[1:], env, specs, phase)


def sample_layout(kind: type[KVLayout], spec: AttnSpec) -> KVLayout:
    """A layout of the kind for asking what can serve it; counts do not matter to capabilities, page size does."""
    return kind(
        num_pages=2, page_size=64, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, dtype=spec.kv_dtype
    )


def why_not(
    impl: AttentionImpl,
    *,
    env: Env,
    specs: Sequence[AttnSpec],
    phase: Mode,
    layout: KVLayout,
    is_sharded: bool,
) -> str | None:
    """Why an attention implementation cannot serve a model's layers in a phase, or None."""
    bucket = Bucket(
        tokens=1 if phase == "decode" else 16, seqs=1, pages_per_seq=1, max_q_len=1, max_kv_len=64, mode=phase
    )
    reasons = [impl.caps.why_not(env, spec, bucket, layout) for spec in specs]
    if is_sharded and "shard_map" not in impl.caps.features:
        reasons.append("does not support features shard_map")
    return next((r for r in reasons if r), None)


def _choose_layout(
    registry: Registry, config: EngineConfig, env: Env, specs: Sequence[AttnSpec], default: str
) -> tuple[KVLayout, Reason]:
    """The layout that the wanted implementations share; the configured one is taken as it is."""
    if config.layout != AUTO:
        kind = registry.load(registry.find("layout", config.layout))
        return sample_layout(kind, specs[0]), Reason("layout", config.layout, "chosen by name")
    wanted = config.kernels.get("attention", KernelChoice())
    named = {getattr(wanted, phase) for phase in PHASES} - {AUTO}
    found: dict[str, Candidate] = {}
    for candidate in candidates(registry, "attention", env, interpret=_interpreted(config, *named)):
        found.setdefault(
            candidate.name, candidate
        )  # one of a name that is taken comes after the one that has it
    for name in sorted(named - set(found)):
        raise unknown_name(
            "kernel of op attention", name, found, "`enginebay plugins` lists what is installed."
        )
    lists = [found[name].impl.caps.layouts for name in sorted(named) if found[name].impl is not None]
    layout = common_layout(lists) if lists else default
    if layout is None:
        raise UnsupportedError(
            explain(
                f"attention kernels {', '.join(sorted(named))} share no cache layout",
                "implementations with a common layout",
                "Choose others for some phase.",
            )
        )
    why = (
        f"first that {', '.join(sorted(named))} share" if lists else f"the default of platform {env.platform}"
    )
    return sample_layout(registry.load(registry.find("layout", layout)), specs[0]), Reason(
        "layout", layout, why
    )


@dataclasses.dataclass(frozen=True)
class OpsBinder:
    """Makes the Ops of a step: attention by phase, with its layout found by the layer's spec, sharded over heads."""

    chosen: ChosenKernels
    info: ModelInfo
    placement: Placement

    def __call__(self, bucket: Bucket, layouts: Layouts) -> Ops:
        impl = self.chosen.attention[bucket.mode]
        by_spec = {self.info.attention[group]: layout for group, layout in layouts.items()}
        plain = self.chosen.bound()

        def attention(
            q: jax.Array,
            k: jax.Array | None,
            v: jax.Array | None,
            cache: CacheArrays,
            batch: AttnBatch,
            *,
            spec: AttnSpec,
            rope: RopeSpec | None = None,
        ) -> tuple[jax.Array, CacheArrays]:
            fuses = "rope_kv_write" in plain and not _writes(impl) and k is not None
            if rope is not None and not fuses:
                q = plain["rope"](q, batch.positions, spec=rope)
                k = None if k is None else plain["rope"](k, batch.positions, spec=rope)
            args = (q, k, v, cache, batch)
            return self._attention(impl, plain, bucket, by_spec[spec], spec, rope if fuses else None, args)

        return Ops(
            attention,
            plain["embedding"],
            plain["linear"],
            plain["rms_norm"],
            add_rms_norm_of(plain),
            plain["rope"],
            self.chosen.names,
        )

    def _attention(
        self,
        impl: AttentionImpl,
        plain: Mapping[str, Any],
        bucket: Bucket,
        layout: KVLayout,
        spec: AttnSpec,
        rope: RopeSpec | None,
        args: tuple[Any, ...],
    ) -> tuple[jax.Array, CacheArrays]:
        """Write and attend, per shard. With `rope` the op rope_kv_write rotates q and k, which come as they are."""
        shards = self.placement.num_shards("kv_heads")
        local_spec = spec.per_shard(shards)
        local = dataclasses.replace(layout, num_kv_heads=layout.num_kv_heads // shards)
        config, _ = self.chosen.tuned.config("attention", impl, self.chosen.env, local_spec, bucket, local)

        def run(
            q: jax.Array,
            k: jax.Array | None,
            v: jax.Array | None,
            cache: CacheArrays,
            batch: AttnBatch,
        ) -> tuple[jax.Array, CacheArrays]:
            if not _writes(impl) and k is not None:
                if rope is None:
                    cache = plain["kv_write"](cache, batch.slots, k, v, layout=local)
                else:
                    where = (batch.positions, batch.slots)
                    q, cache = plain["rope_kv_write"](q, k, v, cache, *where, spec=rope, layout=local)
                k = v = None
            out, cache, _ = impl(q, k, v, cache, batch, spec=local_spec, layout=local, config=config)
            return out, cache

        if shards == 1:
            return run(*args)
        heads = PartitionSpec(None, self.placement.rules["kv_heads"])
        arrays = {
            n: self.placement.spec((None,) * axis + ("kv_heads",)) for n, axis in layout.head_axis().items()
        }
        sharded = jax.shard_map(
            run,
            mesh=self.placement.mesh,
            in_specs=(heads, heads, heads, arrays, PartitionSpec()),
            out_specs=(heads, arrays),
            check_vma=False,
        )
        return sharded(*args)


def _writes(impl: AttentionImpl) -> bool:
    """Whether an attention implementation writes the cache itself."""
    return "fused_write" in impl.caps.features
