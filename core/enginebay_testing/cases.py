"""The cases of a registered part at each level, which `enginebay check` and `--enginebay-level`
run.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import unittest
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from enginebay.compose.candidates import ANY
from enginebay.compose.import_paths import RegistryWithPaths, import_path, with_paths_of
from enginebay.compose.ops import ATTENTION
from enginebay.contracts.cache import KVLayout
from enginebay.contracts.platform import Platform
from enginebay.errors import PluginError, UnknownNameError, UnsupportedError, explain, unknown_name
from enginebay.ops.caps import Env, Interpretable
from enginebay.plugins.registry import Entry, Registry, import_target
from enginebay_testing import suites
from enginebay_testing.op_kit import CaseBudget, OpCase, OpKit, kit_of
from enginebay_testing.quantized import FORMS, ROUNDINGS, STORAGES
from enginebay_testing.suites import Choices
from enginebay_testing.toolchains import KernelCompiler
from enginebay_testing.verdicts import Run

if TYPE_CHECKING:
    from enginebay_testing.process_state import ProcessState

Level = Literal["interpret", "compile", "run"]
LEVELS: tuple[Level, ...] = get_args(Level)

HOST = Env("cpu")
"""Target name of cases whose kernel is interpreted."""

ENGINES_IN_SHORT = ("greedy", "nothing_compiles", "released", "penalised", "ledger")
"""Parts of the names of the representative checks of an engine or an executor; other checks compile
many programs.
"""


@dataclasses.dataclass(frozen=True)
class Case:
    """One check of one part at one level.

    `target` is the platform whose devices run the case, "interpreter", or the architecture to
    compile for. `traits` are the case's values on the axes of the support matrix, such as "dtype":
    "bfloat16" and "mode": "decode".
    """

    level: Level
    target: str
    name: str
    run: Run
    representative: bool = True
    traits: Mapping[str, str] = dataclasses.field(default_factory=dict)


def select_parts(registry: Registry, selector: str) -> list[Entry]:
    """Like `suites.select`, but a bare name selects every part with that name. UnknownNameError
    suggests the nearest name.
    """
    try:
        return suites.select(registry, selector)
    except PluginError:  # broken or not installed: the part's only case reports it
        named = [e for e in registry.entries if suites.label(e) == selector]
        if not named:
            raise
        return named
    except UnknownNameError:
        named = [e for e in registry.entries if e.name == selector]
        if named:
            return named
        if ":" in selector:
            raise
        known = {*(e.name for e in registry.entries), *(suites.label(e) for e in registry.entries)}
        todo = (
            "Write NAME, KIND, KIND:NAME, kernel:OP:NAME or executor:MODULE:ATTRIBUTE; "
            "`enginebay plugins` lists what is installed."
        )
        raise unknown_name("part", selector, known, todo) from None


_KERNEL = re.compile(r"kernel:(?P<op>\w+):(?P<path>[\w.]+:[\w.]+)")
_EXECUTOR = re.compile(rf"{suites.EXECUTOR}:(?P<path>[\w.]+:[\w.]+)")


def with_path(registry: Registry, selector: str) -> Registry:
    """Return `registry` with the part of a selector "kernel:OP:module:attribute" or
    "executor:module:attribute"; unchanged for every other selector. ConfigError for a path that
    cannot be imported.
    """
    executor = _EXECUTOR.fullmatch(selector)
    if executor is not None:
        path = executor["path"]
        made = import_path(path, suites.EXECUTOR)
        return RegistryWithPaths(registry, {(suites.EXECUTOR, "", path): made})
    found = _KERNEL.fullmatch(selector)
    if found is None:
        return registry
    layout = next(iter(registry.names("layout")), "hnd")
    return with_paths_of(registry, [found["op"]], [found["path"]], layout)


def part_cases(
    registry: Registry,
    entry: Entry,
    level: Level | None = None,
    choices: Choices | None = None,
    before: Callable[[], ProcessState] | None = None,
) -> list[Case]:
    """Return the cases of a part at a level; None means every level that this machine can run.

    Without a platform in `choices`, cases run on the platform that `suites.platform_of` chooses. A
    kernel that serves this platform is run; any other kernel is interpreted and compiled if it
    declares how. A part without cases at a level gets one case that gives the reason. `before`
    returns the state of the process before the part was imported, for the trial of a kernel; None:
    the state when the trial begins.
    """
    if entry.state != "ready":
        broken = functools.partial(_refuse, entry.reason, broken=entry.state == "broken")
        return [Case(level or "run", "", "loads", broken)]
    choices = choices or Choices()
    if level == "run":
        return list(_run_cases(registry, entry, choices, before))
    if level is not None:
        return list(_LEVELS[level](registry, entry, choices))
    here = suites.platform_of(registry, entry, choices.platform)
    if entry.kind != "kernel" or entry.why_not_on(here.name) is None:
        return list(_run_cases(registry, entry, choices, before))
    found: list[Case] = []
    if _loaded(registry, entry, Interpretable):
        found += _interpret_cases(registry, entry, choices)
    if choices.trace is None and _compiler_target(entry):
        found += _compile_cases(registry, entry, choices)
    return found or list(_run_cases(registry, entry, choices, before))


def _refuse(reason: str, *, broken: bool) -> None:
    raise PluginError(reason) if broken else unittest.SkipTest(reason)


def _unsupported(level: Level, reason: str) -> Case:
    return Case(level, "", "all", functools.partial(_refuse, reason, broken=False))


def _loaded(registry: Registry, entry: Entry, contract: type) -> bool:
    try:
        return isinstance(registry.load(entry), contract)
    except PluginError:
        return False  # the case that checks the declaration reports it


def _run_cases(
    registry: Registry, entry: Entry, choices: Choices, before: Callable[[], ProcessState] | None
) -> Iterator[Case]:
    platform = suites.platform_of(registry, entry, choices.platform)
    target = platform.name
    if choices.trace is not None:
        yield from _kernel_cases(registry, entry, platform, choices)
        return
    try:
        checks = suites.part_checks(registry, entry, choices)
    except ModuleNotFoundError as error:  # some suites need a library of the extra `test`
        todo = explain(
            f"{error.name} is not installed", "the extra test", "Install enginebay[test]."
        )
        yield _unsupported("run", todo)
        return
    kernels = {case.name: case for case in _kernel_cases(registry, entry, platform, choices)}
    for name, check in checks:
        if name not in kernels:
            is_engine = entry.kind in ("engine", suites.EXECUTOR)
            short = not is_engine or any(word in name for word in ENGINES_IN_SHORT)
            yield Case("run", target, name, check, short, _plain_traits(name))
    yield from kernels.values()
    if kernels and choices.seed is not None:
        from enginebay_testing.kernel_trial import registered_trial

        env, outside = platform.env(), not entry.built_in
        trial = registered_trial(registry, entry, env, choices.seed, outside=outside, before=before)
        trial_on = functools.partial(suites.run_on, platform, trial)
        yield Case("run", target, f"{entry.op}[trial]", trial_on)


def _extent(entry: Entry, choices: Choices, *, interpreted: bool = False) -> CaseBudget:
    """Return the extent of a kernel's cases, with the sets of inputs that the caller chose."""
    extent = CaseBudget(interpreted=interpreted).of(entry)
    if choices.seed is not None:
        extent = dataclasses.replace(extent, seed=choices.seed)
    return extent if choices.seeds is None else dataclasses.replace(extent, num_seeds=choices.seeds)


def _kernel_cases(
    registry: Registry, entry: Entry, platform: Platform, choices: Choices
) -> Iterator[Case]:
    """Return the cases of a kernel on a platform; none for other parts and kernels that fail to
    load.
    """
    if entry.kind != "kernel" or entry.why_not_on(platform.name) is not None:
        return
    try:
        kernel = registry.load(entry)
    except PluginError:
        return
    env = platform.env()
    layouts = suites.kernel_layouts(registry, entry, kernel)
    extent, kit = _extent(entry, choices), kit_of(registry, entry.op)
    if choices.trace is None:
        found = [*capability_cases(entry, kit), *kit.cases(kernel, env, layouts, extent)]
    else:
        found = _traced(registry, entry, kernel, env, layouts, extent, choices.trace)
    for case in found:
        run = functools.partial(suites.run_on, platform, case.run)
        yield Case("run", platform.name, case.name, run, case.representative, case.traits)


def _traced(
    registry: Registry,
    entry: Entry,
    kernel: Any,
    env: Env,
    layouts: list[type[KVLayout]],
    extent: CaseBudget,
    path: str,
) -> list[OpCase]:
    """Return the cases of a kernel that a trace has."""
    from enginebay_testing.traced_cases import find_trace, traced_cases

    op = registry.load(registry.find("op", entry.op))
    trace = find_trace(path)
    if trace.layout in registry.names("layout"):
        own = registry.load(registry.find("layout", trace.layout))
        layouts = sorted(layouts, key=lambda layout: layout is not own)
    return list(traced_cases(trace, op, kernel, env, layouts, extent))


def _plain_traits(name: str) -> Mapping[str, str]:
    """Return the dtype of a check whose name has a dtype in brackets."""
    inside = name.partition("[")[2].rstrip("]").split("-")
    return {"dtype": next((d for d in suites.DTYPES if d in inside), "")} if inside else {}


def _interpret_cases(registry: Registry, entry: Entry, choices: Choices) -> Iterator[Case]:
    if entry.kind != "kernel":
        yield _unsupported(
            "interpret", f"only kernels can be interpreted; this part is a {entry.kind}"
        )
        return
    kernel = registry.load(entry)
    if not isinstance(kernel, Interpretable):
        yield _unsupported("interpret", "the kernel has no method `interpreted`")
        return
    try:
        interpreted = kernel.interpreted()
    except UnsupportedError as error:
        yield _unsupported("interpret", str(error))
        return
    layouts = suites.kernel_layouts(registry, entry, interpreted)
    extent = _extent(entry, choices, interpreted=True)
    given = interpreted, HOST, layouts, extent
    found = (
        kit_of(registry, entry.op).cases(*given)
        if choices.trace is None
        else _traced(registry, entry, *given, choices.trace)
    )
    for case in found:
        yield Case(
            "interpret", "interpreter", case.name, case.run, case.representative, case.traits
        )


def _compiler_target(entry: Entry) -> str:
    capabilities = entry.declaration.capabilities if entry.declaration else {}
    return str(capabilities.get("compiler", ""))


def _compile_cases(registry: Registry, entry: Entry, choices: Choices) -> Iterator[Case]:
    from enginebay_testing.compile_suite import compile_checks

    declared = _compiler_target(entry)
    if not declared:
        what = (
            "the capability `compiler`"
            if entry.kind == "kernel"
            else f"a kernel; this part is a {entry.kind}"
        )
        yield _unsupported("compile", f"compiling for other devices needs {what}")
        return
    kernel = registry.load(entry)
    compiler: KernelCompiler = import_target(declared, f"compiler of {suites.label(entry)}")
    named = entry.declaration.capabilities.get("layouts") if entry.declaration else None
    layouts = suites.layouts_of(registry, kernel) if entry.op == ATTENTION else []
    layouts += [registry.load(registry.find("layout", name)) for name in named or ()]
    found = False
    for check in compile_checks(kit_of(registry, entry.op), kernel, compiler, layouts):
        found = True
        yield Case(
            "compile", check.target, check.name, check.run, check.representative, check.traits
        )
    if not found:
        yield _unsupported("compile", f"op {entry.op} has no programs to compile")


_LEVELS: dict[Level, Callable[[Registry, Entry, Choices], Iterator[Case]]] = {
    "interpret": _interpret_cases,
    "compile": _compile_cases,
}


def chosen(cases: Sequence[Case], *, everything: bool) -> list[Case]:
    """Return all cases, or the representative ones."""
    return [case for case in cases if everything or case.representative]


KNOWN_VALUES: Mapping[str, tuple[str, ...]] = {
    "quantizations": tuple(FORMS),
    "activation_quantizations": ROUNDINGS,
    "storages": STORAGES,
}
"""The values of capabilities for which the kit can make data."""

NOT_IN_CASES: Mapping[str, str] = {
    "priority": "it chooses among kernels and changes no result",
    "compiler": "it makes the cases of the level compile",
    "custom_calls": "the compiler's programs show these calls",
    "register_call": "it lets stored programs find a custom call, and changes no result",
    "sharded": "the suites of engines and models run on several devices",
}
"""Capabilities of kernels without an axis, and why."""


def capability_cases(entry: Entry, kit: OpKit) -> Iterator[OpCase]:
    """Yield a case that fails for each declared capability without an axis in the kit, and one that
    is UNSUPPORTED for each declared value for which the kit has no data.
    """
    declared = {} if entry.declaration is None else entry.declaration.capabilities
    for name in (*KNOWN_VALUES, "layouts"):
        values = tuple(declared.get(name) or ())
        if values and name not in kit.capabilities:
            what = f"{entry.op} kernel {entry.name!r} declares {name} {', '.join(values)}"
            lacks = f"{what}, but the kit of op {entry.op} has no axis for it"
            todo = "Add the capability and its axis to OpKit.capabilities."
            yield OpCase(f"capability[{name}]", functools.partial(_lacks_an_axis, lacks, todo))
            continue
        for value in values if name in KNOWN_VALUES else ():
            if value not in (ANY, *KNOWN_VALUES[name]):
                given = f"the kit has no data for {name} {value}"
                run = functools.partial(_has_no_data, given, ", ".join(KNOWN_VALUES[name]))
                yield OpCase(f"capability[{name}-{value}]", run)


def _lacks_an_axis(what: str, todo: str) -> None:
    raise PluginError(f"{what}. {todo}")


def _has_no_data(given: str, allowed: str) -> None:
    raise UnsupportedError(given, allowed, "Check this value with a test of your own.")
