"""Makes the plan of an engine from a configuration, and the engine from the plan."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

from enginebay.compose.binding import OpsBinder, bound_ops
from enginebay.compose.checked_paths import check_import_paths
from enginebay.compose.engine_steps import engine_steps, refuse_problems
from enginebay.compose.import_paths import BY_PATH, import_path
from enginebay.compose.kernel_configs import require_tuned
from enginebay.compose.kernels import choose_kernels
from enginebay.compose.key_centers import measured_centers, with_key_centers
from enginebay.compose.model_cache import dtypes_by_group, model_cache
from enginebay.compose.ops import ATTENTION
from enginebay.compose.override import by_op, overridden_plan
from enginebay.compose.partition import split_model
from enginebay.compose.plan import Plan
from enginebay.compose.platforms import make_platforms, pick_platform
from enginebay.compose.processors import choose_processors
from enginebay.compose.resolve import ResolveInputs, resolve
from enginebay.compose.sampling_defaults import choose_sampling_defaults
from enginebay.compose.shadowing import with_shadow
from enginebay.compose.weight_format import choose_weight_format
from enginebay.config import FILES, LOCAL_EXECUTOR, NO_PROPOSER, EngineConfig, Reason
from enginebay.config_sections import AUTO
from enginebay.contracts.engine import Engine
from enginebay.contracts.executor import EngineParts, Executor, MakeExecutor, weight_bytes
from enginebay.contracts.model import (
    Checkpoint,
    ModelFamily,
    with_cache_dtypes,
    with_info,
    with_padding,
)
from enginebay.contracts.placement import make_placement
from enginebay.contracts.proposer import Proposer
from enginebay.contracts.sampler import Sampler
from enginebay.contracts.scheduler import Scheduler
from enginebay.errors import (
    CheckpointError,
    ConfigError,
    EnginebayError,
    PluginError,
    UnsupportedError,
    unknown_name,
)
from enginebay.jax_start import prepare_jax
from enginebay.ops.caps import Preparable
from enginebay.ops.select import Candidate, choose, is_import_path
from enginebay.plugins.guard import reason_of
from enginebay.plugins.registry import Entry, Registry, import_target, load_registry
from enginebay.waits import waiting
from enginebay.weights import Weight

log = logging.getLogger("enginebay.compose")

Progress = Callable[[str, int, int], None]
"""Called as progress(title, done, total), for example ("loading weights", bytes, all bytes)."""


@dataclasses.dataclass(frozen=True)
class Composed:
    """An engine with its weights loaded, its plan, its scheduler and its proposer."""

    plan: Plan
    engine: Engine
    scheduler: Scheduler
    proposer: Proposer | None = None


def make_plan(
    config: EngineConfig, registry: Registry | None = None, checkpoint: Checkpoint | None = None
) -> Plan:
    """Choose every part for a configuration; EnginebayError for a choice that does not work here.

    `checkpoint`: an open model to use; None opens `config.model`.
    """
    registry = registry or load_registry()
    prepare_jax(config)
    platforms = make_platforms(registry)
    platform = pick_platform(registry, config, platforms)
    if checkpoint is None:
        checkpoint = open_checkpoint(registry, config)
    family = find_family(registry, checkpoint.architecture)
    dtype = platform.default_dtype if config.dtype == AUTO else config.dtype
    weight_dtype = dtype if config.weight_dtype == AUTO else config.weight_dtype
    placement = make_placement(platform.devices(), config.mesh, config.rules())
    shards = placement.num_shards("kv_heads")
    model = family.build(
        checkpoint.config, dtype=dtype, num_shards=shards, max_model_len=config.max_model_len
    )
    weight_format, why_weights = choose_weight_format(
        registry, config, checkpoint, model, weight_dtype, placement
    )
    named = config.quantization.model_copy(update={"name": weight_format.name})
    config = config.model_copy(update={"quantization": named})
    cached = model_cache(checkpoint.config) if config.kv_cache_dtype == AUTO else None
    info = with_cache_dtypes(model.info, dtypes_by_group(model.info, config, cached))
    info = with_padding(info, checkpoint.num_token_ids, checkpoint.token_info)
    model = with_key_centers(with_info(model, info))
    here = platform.env().platform
    facts = ResolveInputs(
        platforms=platforms,
        engines=_facts(registry, "engine", here),
        schedulers=_facts(registry, "scheduler", here),
        samplers=_facts(registry, "sampler", here),
        default_dtype=platform.default_dtype,
        model_max_len=model.info.max_model_len,
        model_auto_len=model.info.auto_max_model_len,
        weight_bytes=weight_bytes(model, placement, weight_format),
        model_cache=cached,
        mixing=[e.name for e in registry.entries if e.capability("mixed_steps")],
        prefers_mixed_steps=platform.mixed_steps,
    )
    settled, reasons = resolve(config, facts)
    reasons += why_weights
    _check_parts(registry, settled, here)
    make_executor, why_executor = choose_executor(settled)
    steps = engine_steps(
        registry,
        settled,
        model=model,
        platform=platform,
        placement=placement,
        weight_format=weight_format,
    )
    kernels = choose_kernels(
        registry,
        settled,
        platform.env(),
        info=model.info,
        placement=placement,
        default_layout=platform.default_layout,
        steps=steps,
        needs=weight_format.needs,
    )
    processors = choose_processors(registry, settled)
    reasons += (why_executor, processors.reason, *kernels.reasons)
    plan = Plan(
        registry=registry,
        config=settled,
        reasons=reasons,
        platform=platform,
        checkpoint=checkpoint,
        model=model,
        placement=placement,
        kernels=kernels,
        processors=processors,
        weight_format=weight_format,
        make_executor=make_executor,
    )
    return _completed(plan)


def _completed(plan: Plan) -> Plan:
    """Check the kernels that were chosen by import path, and add the defaults of sampling
    parameters, adapters and a shadow.
    """
    plan = _with_adapters(_with_sampling_defaults(check_import_paths(plan)))
    plan = with_shadow(plan)
    require_tuned(plan)
    return plan


def _with_sampling_defaults(plan: Plan) -> Plan:
    sampler = plan.registry.find("sampler", plan.config.sampler.name)
    defaults = choose_sampling_defaults(
        plan.config,
        plan.checkpoint,
        plan.processors.entries,
        greedy_only=bool(sampler.capability("greedy_only")),
    )
    reasons = (*plan.reasons, defaults.reason)
    return dataclasses.replace(plan, sampling_defaults=defaults, reasons=reasons)


def _with_adapters(plan: Plan) -> Plan:
    """Add the adapters of the configuration, by the op that applies adapters."""
    if not plan.config.lora and not plan.config.lora_slots:
        return plan
    for op in plan.kernels.ops.values():
        if op.adapters is not None:
            what = f"the adapters of op {op.name!r}"
            try:
                adapted: Plan = import_target(op.adapters, what)(plan)
            except EnginebayError:
                raise
            except Exception as error:
                allowed, todo = "a function that raises no such error", "Fix the plugin of the op."
                raise PluginError(f"{what}: {reason_of(error)}", allowed, todo) from error
            return adapted
    given, todo = "adapters, but no op applies them", "Install one, or name no adapters."
    raise UnsupportedError(given, "a plugin such as enginebay_lora", todo)


def build(plan: Plan, progress: Progress | None = None) -> Composed:
    """Make the engine, its scheduler and its proposer; load the weights and allocate the cache."""
    engine = make_engine(plan, progress)
    engine.make_arrays()
    choice = plan.config.scheduler
    scheduler = _make(plan.registry, "scheduler", choice.name, choice.options)
    return Composed(plan, engine, scheduler, make_proposer(plan.registry, plan.config))


def make_proposer(registry: Registry, config: EngineConfig) -> Proposer | None:
    """Make the proposer of a resolved configuration; None when there is no proposer."""
    choice = config.proposer
    if choice.name == NO_PROPOSER:
        return None
    proposer: Proposer = _make(registry, "proposer", choice.name, choice.options)
    return proposer


def make_engine(plan: Plan, progress: Progress | None = None) -> Engine:
    """Make the engine with its memory plan. Nothing is loaded or allocated before make_arrays()."""
    choice, kernels = plan.config.engine, plan.kernels
    stored = {spec.kv_storage or spec.kv_dtype for spec in kernels.specs.values()}
    dtypes = {"dtypes": (plan.config.weight_dtype,), "kv_dtypes": stored}
    for op, impl in [
        *((ATTENTION, one) for one in kernels.attention.values()),
        *kernels.plain.items(),
    ]:
        if isinstance(impl, Preparable):
            impl.prepare({**kernels.needs_of(op), **dtypes})
    engine: Engine = _make(
        plan.registry, "engine", choice.name, choice.options, make_parts(plan, progress)
    )
    refuse_problems(plan.kernels, choice.name, engine.attention_problems())
    return engine


def choose_executor(config: EngineConfig) -> tuple[MakeExecutor | None, Reason]:
    """Return what makes the configured executor, from its import path, and the reason; None for the
    engine's own executor.

    UnknownNameError for another name; ConfigError for a path that cannot be imported, or whose
    target cannot be called.
    """
    name = config.executor
    if name == LOCAL_EXECUTOR:
        return None, Reason("executor", name, "runs commands in this process")
    if not is_import_path(name):
        todo = 'Name an executor of yours by its import path, "package.module:attribute".'
        raise unknown_name("executor", name, [LOCAL_EXECUTOR], todo)
    found = import_path(name, "executor")
    if not callable(found):
        given = f"executor {name!r}, which is of type {type(found).__name__}"
        allowed = "a callable that takes EngineParts and returns an Executor"
        raise ConfigError(given, allowed, "Name such a callable, or leave the executor out.")
    return functools.partial(_make_executor, name, found), Reason("executor", name, BY_PATH)


def _make_executor(name: str, make: Callable[[EngineParts], Any], parts: EngineParts) -> Executor:
    """Make the executor of an import path. PluginError when `make` fails with an error of its own,
    or returns something else.
    """
    todo = "Correct it, or leave the executor out."
    try:
        made = make(parts)
    except EnginebayError:
        raise
    except (Exception, SystemExit) as error:
        given = f"executor {name!r} cannot be made: {reason_of(error)}"
        raise PluginError(given, "a callable that takes EngineParts", todo) from error
    if not isinstance(made, Executor):
        given = f"executor {name!r}, which returns an object of type {type(made).__name__}"
        raise PluginError(given, "a callable that returns an Executor", todo)
    return made


def make_parts(plan: Plan, progress: Progress | None = None) -> EngineParts:
    """Return the parts that an engine is made of. Nothing is loaded or allocated."""
    registry, config = plan.registry, plan.config
    ops = bound_ops(plan.kernels, plan.placement)
    decode = plan.kernels.attention["decode"].caps
    report = progress and functools.partial(progress, "loading weights")

    def load_weights() -> dict[str, Weight]:
        with waiting(f"loading the weights of {plan.checkpoint.folder}"):
            return plan.load_weights(progress=report)

    def changed(parts: Mapping[str, object]) -> EngineParts:
        return make_parts(overridden_plan(plan, by_op(parts), check=False))

    def register_call(name: str) -> None:
        target = plan.kernels.custom_calls[name]
        if target is not None:
            import_target(target, f"register_call of a kernel with the custom call {name!r}")(name)

    return EngineParts(
        config=config,
        model=split_model(plan.model, plan.placement),
        load_weights=load_weights,
        measured_centers=functools.partial(
            measured_centers, plan.model, plan.kernels, plan.placement
        ),
        ops=OpsBinder(plan.kernels, plan.model.info, plan.placement),
        sampler=plan.sampler or make_sampler(registry, config, ops),
        processors=plan.processors.processors,
        has_greedy=plan.sampler is None
        and bool(registry.find("sampler", config.sampler.name).capability("exact_greedy")),
        platform=plan.platform,
        placement=plan.placement,
        make_executor=plan.make_executor,
        layout_type=plan.kernels.layout_type,
        layout=plan.kernels.layout,
        weight_format=plan.weight_format,
        compact_decode=decode.compact_decode,
        ragged_decode=decode.ragged_decode,
        drafts_are_rows=decode.splits_rows,
        free_padding_rows=plan.kernels.free_padding_rows,
        kernels=plan.kernels.names,
        custom_calls=tuple(sorted(plan.kernels.custom_calls)),
        register_call=register_call,
        shadow=plan.shadow,
        adapters=plan.adapters,
        program_digest=plan.program_digest(),
        changed=changed,
    )


def make_sampler(registry: Registry, config: EngineConfig, ops: Mapping[str, Any]) -> Sampler:
    """Make the configured sampler. A sampler with the capability `draws` gets the implementation of
    the op that it names, from `ops`; UnsupportedError when `ops` has none.
    """
    entry = registry.find("sampler", config.sampler.name)
    options = registry.options(entry, config.sampler.options)
    target = registry.load(entry)
    sampler = target(options) if options is not None else target
    op = entry.capability("draws")
    if op:
        if op not in ops:
            given = f"sampler {entry.name!r} draws with op {op!r}, which has no implementation here"
            todo = "See the reason with `enginebay explain`, or pass another --sampler."
            raise UnsupportedError(given, ", ".join(ops), todo)
        sampler = functools.partial(sampler, draw=ops[op])
    made: Sampler = sampler
    return made


def _check_parts(registry: Registry, config: EngineConfig, platform: str) -> None:
    """Raise UnsupportedError for a part that cannot be used here, for a proposer with an engine
    that does not verify drafts, and for an implementation of an op that the sampler does not use.
    Raise ConfigError for wrong options of a part.
    """
    engine, sampler, proposer = config.engine.name, config.sampler.name, config.proposer
    drafts = {} if proposer.name == NO_PROPOSER else {"proposer": proposer}
    chosen = {"engine": config.engine, "scheduler": config.scheduler, "sampler": config.sampler}
    for kind, choice in (chosen | drafts).items():
        entry = registry.find(kind, choice.name)
        choose(kind, entry.name, _facts(registry, kind, platform))
        registry.options(entry, choice.options)
    if drafts and not registry.find("engine", engine).capability("verifies"):
        able = _names(registry, "engine", lambda e: bool(e.capability("verifies")))
        given = f"proposer = {proposer.name!r} with engine {engine!r}, which verifies no drafts"
        todo = "Choose another engine with --engine, or leave --proposer out."
        raise UnsupportedError(given, f"engines that verify drafts: {able or 'none'}", todo)
    for op, kernel in config.kernels.items():
        does = functools.partial(_draws, op)
        able = _names(registry, "sampler", does)
        if kernel.decode != AUTO and able and not does(registry.find("sampler", sampler)):
            given = f"kernels.{op} = {kernel.decode!r}, but sampler {sampler!r} does not draw with"
            todo = f"Choose one with --sampler, or leave --kernel {op}={kernel.decode} out."
            raise UnsupportedError(f"{given} this op", f"samplers that do: {able}", todo)


def _draws(op: str, entry: Entry) -> bool:
    return bool(entry.capability("draws") == op)


def _names(registry: Registry, kind: str, is_able: Callable[[Entry], bool]) -> str:
    return ", ".join(e.name for e in registry.entries if e.kind == kind and is_able(e))


def _make(registry: Registry, kind: str, name: str, options: Any, *before: Any) -> Any:
    """Make the part of a name, with its options when it declares some."""
    entry = registry.find(kind, name)
    made = registry.options(entry, options)
    target = registry.load(entry)
    return target(*before, made) if made is not None else target(*before)


def _facts(registry: Registry, kind: str, platform: str) -> list[Candidate]:
    """Return the candidates among the parts of a kind on a platform."""
    return [
        Candidate(e.name, e.priority, None, e.why_not_on(platform), built_in=e.built_in)
        for e in registry.entries
        if e.kind == kind
    ]


def open_checkpoint(
    registry: Registry, config: EngineConfig, name: str | None = None
) -> Checkpoint:
    """Open the stored model `name`, by default `config.model`, with the part `config.checkpoint`.
    `auto` is the part that has a model of this name, else that of folders and files.

    CheckpointError when it cannot be opened, or two parts have the name; UnknownNameError when
    there is no such part.
    """
    model = config.model if name is None else name
    part = config.checkpoint
    if part == AUTO:
        ready = registry.ready("checkpoint")
        parts = [f"{e.package}/{e.name}" for e in ready if model in e.capability("models", ())]
        if len(parts) > 1:
            todo = "Choose one with `checkpoint`."
            raise CheckpointError(
                f"model = {model!r}, which {' and '.join(parts)} have", "one", todo
            )
        part = parts[0] if parts else FILES
    open_model = registry.load(registry.find("checkpoint", part))
    opened: Checkpoint = open_model(model)
    return opened


def find_family(registry: Registry, architecture: str) -> ModelFamily:
    """Return the model family that serves an architecture of a checkpoint's config.json.

    If several serve it, the family with the highest priority is used; for equal priorities, a
    built-in one. CheckpointError when none serves it.
    """
    served: dict[str, Entry] = {}
    for entry in reversed(registry.ready("model")):
        served |= dict.fromkeys(entry.capability("architectures", ()), entry)
    if architecture not in served:
        todo = "Install a plugin with a model family that serves it."
        raise CheckpointError(str(unknown_name("architecture", architecture, served, todo)))
    family: ModelFamily = registry.load(served[architecture])
    return family
