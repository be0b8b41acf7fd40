"""Finds the conformance checks of a registered part, for `--enginebay-check` and
tests/conformance.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import unittest
from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import BaseModel

from enginebay.cli.command import Command
from enginebay.compose.ops import ATTENTION
from enginebay.config import EngineConfig
from enginebay.config_sections import Choice
from enginebay.contracts.cache import KVLayout
from enginebay.contracts.platform import Platform
from enginebay.errors import PluginError, UnsupportedError, unknown_name
from enginebay.ops.caps import Env
from enginebay.ops.op import Op
from enginebay.plugins.hooks import FORMER_KINDS, INTERFACE_VERSIONS
from enginebay.plugins.registry import Entry, Registry
from enginebay_testing.verdicts import Check

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Choices:
    """The caller's choices: the platform by name, the config.json with which model families are
    checked, the number of sets of inputs for each case of a kernel (None: as many as usual), and
    the seed of the second set and of the kernel's trial (None: 1, and no trial). `trace`: the file
    of a captured run, whose calls are the cases of kernels.
    """

    platform: str | None = None
    config: str | None = None
    seeds: int | None = None
    seed: int | None = None
    trace: str | None = None


EVERYTHING = "all"
EXECUTOR = "executor"
"""The first word of the selector of an executor, which is no kind: executor:MODULE:ATTRIBUTE."""
RECORDS: dict[str, type] = {"command": Command, "op": Op}
DTYPES = ("float32", "bfloat16", "float16")


def label(entry: Entry) -> str:
    """Return a part's name on the command line: KIND:NAME, or kernel:OP:NAME."""
    return ":".join(part for part in (entry.kind, entry.op, entry.name) if part)


def kind_of_today(selector: str) -> str:
    """Return a selector whose kind, if it is one of FORMER_KINDS, is that of today."""
    kind, colon, rest = selector.partition(":")
    return FORMER_KINDS.get(kind, (kind, None))[0] + colon + rest


def select(registry: Registry, selector: str) -> list[Entry]:
    """Return the parts that "all", KIND, kernel:OP, KIND:NAME or kernel:OP:NAME selects;
    UnknownNameError when there are none.
    """
    if selector == EVERYTHING:
        return list(registry.entries)
    kind, *rest = selector.split(":")
    if kind not in (*INTERFACE_VERSIONS, *FORMER_KINDS, *([EXECUTOR] if len(rest) > 1 else [])):
        raise unknown_name(
            "kind",
            kind,
            INTERFACE_VERSIONS,
            f"Write {EVERYTHING}, KIND, KIND:NAME, kernel:OP:NAME or {EXECUTOR}:MODULE:ATTRIBUTE.",
        )
    op = rest.pop(0) if kind == "kernel" and rest else ""
    if rest:
        return [registry.find(kind_of_today(kind), ":".join(rest), op)]
    found = [e for e in registry.entries if e.is_of(kind) and op in ("", e.op)]
    if not found:
        raise unknown_name(
            "part",
            selector,
            map(label, registry.entries),
            "`enginebay plugins` lists what is installed.",
        )
    return found


def part_checks(registry: Registry, entry: Entry, choices: Choices | None = None) -> list[Check]:
    """Return every check of one part: its declaration, and the suite of its kind, if there is one.

    Without a platform in `choices`, the part runs on the platform that `platform_of` chooses. For a
    part that cannot be used here, the only check skips with the reason; for a broken part, it fails
    with the reason.
    """
    if entry.state == "broken":
        return [("loads", functools.partial(_fail, entry.reason))]
    if entry.state == "unavailable":
        return [("loads", functools.partial(_skip, entry.reason))]
    checks: list[Check] = [
        ("declaration_holds", functools.partial(_declaration_holds, registry, entry))
    ]
    try:
        registry.load(entry)
    except PluginError:
        return checks  # declaration_holds reports what is wrong
    suite = _SUITES.get(entry.kind)
    if suite is None:
        return checks
    choices = choices or Choices()
    here = platform_of(registry, entry, choices.platform)
    if entry.kind == "model":
        suite = functools.partial(_model, config=choices.config)
    run_there = [
        (name, functools.partial(run_on, here, check))
        for name, check in suite(registry, entry, here)
    ]
    return [*checks, *run_there]


def _fail(reason: str) -> None:
    raise AssertionError(reason)


def _skip(reason: str) -> None:
    raise unittest.SkipTest(reason)


def _declaration_holds(registry: Registry, entry: Entry) -> None:
    """Check that the target and the options can be imported, and that the options have defaults,
    are frozen and refuse unknown fields.
    """
    declaration = entry.declaration
    assert declaration is not None, "parts that are not broken are declared"
    target = registry.load(entry)
    if declaration.options is not None:
        made = registry.options(entry, {})
        assert isinstance(made, BaseModel), f"options {declaration.options} is not a pydantic model"
        assert made.model_config.get("frozen"), f"{declaration.options} is not frozen"
        assert made.model_config.get("extra") == "forbid", (
            f'{declaration.options} does not set extra="forbid"'
        )
    record = RECORDS.get(entry.kind)
    if record is not None:
        assert isinstance(target, record), f"{declaration.target} is not a {record.__name__}"
    elif entry.kind in ("layout", "platform", "processor", "scheduler"):
        assert isinstance(target, type), f"{declaration.target} is not a class"
    elif entry.kind not in ("format", "model"):
        assert callable(target), f"{declaration.target} is not callable"
    if entry.kind == "op":
        assert target.name == entry.name, (
            f"the op's name is {target.name!r}, but it is registered as {entry.name!r}"
        )
    if entry.op == ATTENTION:
        assert target.name == entry.name, (
            f"the kernel's name is {target.name!r}, but it is registered as {entry.name!r}"
        )


def _made(registry: Registry, entry: Entry) -> Any:
    """Make the part with its default options."""
    options = registry.options(entry, {})
    target = registry.load(entry)
    return target() if options is None else target(options)


def best_platform(registry: Registry) -> Platform:
    """Return the usable platform with the highest priority, which "auto" chooses too."""
    from enginebay.compose.platforms import find_platform

    return find_platform(registry, EngineConfig())


def platform_of(registry: Registry, entry: Entry, name: str | None = None) -> Platform:
    """Return the platform for a part's checks: the named one, else the best one that the part
    declares and that has a device.

    A part that declares none of the usable platforms gets the best of all. UnsupportedError for a
    named platform without a device.
    """
    from enginebay.compose.platforms import find_platform

    if name is not None:
        return find_platform(registry, EngineConfig(platform=name))
    others = entry.why_not_on
    able = [e for e in registry.entries if e.kind != "platform" or others(e.name) is None]
    with contextlib.suppress(UnsupportedError):
        return find_platform(Registry(able), EngineConfig())
    return best_platform(registry)


def run_on(platform: Platform, check: Callable[[], _T]) -> _T:
    """Call a check with the platform's first device as JAX's default."""
    import jax

    devices = platform.devices()
    if not devices or devices[0] == jax.devices()[0]:
        return check()
    with jax.default_device(devices[0]):
        return check()


def _scheduler(registry: Registry, entry: Entry, platform: Platform) -> list[Check]:
    from enginebay_testing.schedulers import scheduler_checks

    assert entry.declaration is not None, "parts that are not broken are declared"
    order = entry.declaration.capabilities.get("order")
    return scheduler_checks(functools.partial(_made, registry, entry), order)


def _proposer(registry: Registry, entry: Entry, platform: Platform) -> list[Check]:
    from enginebay_testing.proposers import proposer_checks

    return proposer_checks(functools.partial(_made, registry, entry))


def _sampler(registry: Registry, entry: Entry, platform: Platform) -> list[Check]:
    from enginebay.compose.composition import make_sampler
    from enginebay_testing.sampler_runs import choose_plain
    from enginebay_testing.samplers import sampler_checks

    assert entry.declaration is not None, "parts that are not broken are declared"
    config = EngineConfig(sampler=Choice(name=entry.name))
    drawn = entry.capability("draws")
    ops = {op: choose_plain(registry, config, platform.env(), op)[0].impl for op in [drawn] if op}
    sampler = make_sampler(registry, config, ops)
    return sampler_checks(
        sampler, greedy_only=bool(entry.declaration.capabilities.get("greedy_only"))
    )


def _processor(registry: Registry, entry: Entry, platform: Platform) -> list[Check]:
    from enginebay_testing.processors import processor_checks

    return processor_checks(
        registry.load(entry), functools.partial(_example_options, registry, entry)
    )


def _example_options(registry: Registry, entry: Entry) -> list[BaseModel | None]:
    """Return the part's default options, and the examples in the JSON schema of its options."""
    default = registry.options(entry, {})
    if default is None:
        return [None]
    examples = type(default).model_json_schema().get("examples", [])
    return [default, *(registry.options(entry, example) for example in examples)]


def _layout(registry: Registry, entry: Entry, platform: Platform) -> list[Check]:
    from enginebay_testing.layouts import layout_checks

    return layout_checks(registry.load(entry), DTYPES)


def _platform(registry: Registry, entry: Entry, platform: Platform) -> list[Check]:
    from enginebay_testing.platforms import platform_checks

    return platform_checks(registry.load(entry)(), registry)


def _format(registry: Registry, entry: Entry, platform: Platform) -> list[Check]:
    from enginebay_testing.output_formats import it_reads_what_is_declared, output_format_checks

    output_format = registry.load(entry)
    reads = functools.partial(it_reads_what_is_declared, output_format, entry.capability("reads"))
    return [*output_format_checks(output_format), ("it_reads_what_is_declared", reads)]


def _engine(registry: Registry, entry: Entry, platform: Platform) -> list[Check]:
    from enginebay_testing.engines import engine_checks
    from enginebay_testing.ledgers import example_checks
    from enginebay_testing.subject import EngineSubject

    assert entry.declaration is not None, "parts that are not broken are declared"
    example = entry.declaration.capabilities.get("ledger_example")
    is_best = platform.name == best_platform(registry).name
    quantised = []
    for name in registry.names("layout"):
        with contextlib.suppress(PluginError):  # the part's own suite reports what is wrong
            if registry.load(registry.find("layout", name))(1, 1, 1, 8, "float32").tolerance:
                quantised.append(name)
    checks = engine_checks(
        EngineSubject(entry.name, choices={} if is_best else {"platform": platform.name}),
        quantised,
    )
    return checks if example is None else [*checks, *example_checks(example, label(entry))]


def _executor(registry: Registry, entry: Entry, platform: Platform) -> list[Check]:
    """Return the checks of the engine that "auto" chooses, with this executor."""
    from enginebay_testing.engines import engine_checks
    from enginebay_testing.subject import EngineSubject

    engine = registry.ready("engine")[0].name
    choices = {EXECUTOR: entry.name, "platform": platform.name}
    return engine_checks(EngineSubject(engine, choices=choices), ())


def _model(
    registry: Registry, entry: Entry, platform: Platform, config: str | None = None
) -> list[Check]:
    from enginebay.compose.binding import OpsBinder
    from enginebay.compose.kernels import choose_kernels
    from enginebay_testing.models import harness_steps, model_checks, read_model_config

    def make_ops(info: Any, placement: Any) -> OpsBinder:
        chosen_layout = EngineConfig(layout="hnd")  # the cache layout of the harness
        steps = functools.partial(harness_steps, info)
        chosen = choose_kernels(
            registry,
            chosen_layout,
            platform.env(),
            info=info,
            placement=placement,
            default_layout="hnd",
            steps=steps,
        )
        return OpsBinder(chosen, info, placement)

    given = None if config is None else read_model_config(config)
    return model_checks(
        registry.load(entry), make_ops, config=given, num_devices=len(platform.devices())
    )


def _kernel(registry: Registry, entry: Entry, platform: Platform) -> list[Check]:
    assert entry.declaration is not None, "parts that are not broken are declared"
    env = platform.env()
    platforms = entry.declaration.platforms
    if platforms and env.platform not in platforms:
        return [
            (
                "runs_here",
                functools.partial(
                    _skip,
                    f"needs platform {' or '.join(platforms)}; this machine has {env.platform}",
                ),
            )
        ]
    try:
        kernel = registry.load(entry)
    except PluginError as error:
        if not isinstance(error.__cause__, UnsupportedError):
            raise
        return [("runs_here", functools.partial(_skip, str(error.__cause__)))]
    return op_checks(registry, entry, kernel, env)


def op_checks(registry: Registry, entry: Entry, kernel: Any, env: Env) -> list[Check]:
    """Return the checks of one form of a kernel in an environment, whatever platforms it declares.

    They cover all pairs of values of the op's axes and the named attention cases. `enginebay check
    --all` runs triples too.
    """
    from enginebay_testing.op_kit import CaseBudget, kit_of

    layouts = kernel_layouts(registry, entry, kernel)
    cases = kit_of(registry, entry.op).cases(
        kernel, env, layouts, CaseBudget(triples=False).of(entry)
    )
    return [(case.name, case.run) for case in cases]


def kernel_layouts(registry: Registry, entry: Entry, kernel: Any) -> list[type[KVLayout]]:
    """Return the layouts that a kernel is checked in: those that it declares, or all layouts if the
    op declares none.
    """
    if entry.op == ATTENTION:
        return layouts_of(registry, kernel)
    declared = {} if entry.declaration is None else entry.declaration.capabilities
    names = declared.get("layouts") or registry.names("layout")
    return [registry.load(registry.find("layout", name)) for name in names]


def layouts_of(registry: Registry, kernel: Any) -> list[type[KVLayout]]:
    """Return the registered layouts of an attention kernel, in its order of preference."""
    known = registry.names("layout")
    return [
        registry.load(registry.find("layout", name))
        for name in kernel.caps.layouts
        if name in known
    ]


_SUITES: dict[str, Callable[[Registry, Entry, Platform], list[Check]]] = {
    "engine": _engine,
    EXECUTOR: _executor,
    "format": _format,
    "kernel": _kernel,
    "layout": _layout,
    "model": _model,
    "platform": _platform,
    "processor": _processor,
    "proposer": _proposer,
    "sampler": _sampler,
    "scheduler": _scheduler,
}
"""The kinds that have a suite; for other kinds only the declaration is checked."""
