"""Unregistered implementations by import path: "package.module:attribute" in place of a kernel's
name.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from enginebay.compose.kernels import ChosenKernels
from enginebay.compose.ops import ATTENTION
from enginebay.compose.plan import Plan
from enginebay.compose.quick_cases import CheckSetting
from enginebay.compose.quick_check import quick_checked
from enginebay.compose.simple_attention import adapt_attention
from enginebay.config import Reason
from enginebay.config_sections import PHASES
from enginebay.errors import ConfigError, InputError, UnsupportedError
from enginebay.ops.op import Op
from enginebay.ops.select import is_import_path
from enginebay.ops.spec import Mode
from enginebay.plugins.guard import guarded, reason_of
from enginebay.plugins.hooks import Declaration
from enginebay.plugins.registry import Entry, Registry

BY_PATH = "by import path"
SWITCH = "verify_kernels = false, or --no-verify-kernels"


class RegistryWithPaths(Registry):
    """A registry in which import paths are kernels too. Their targets are imported when the
    registry is made.
    """

    def __init__(self, registry: Registry, found: Mapping[tuple[str, str], Any]) -> None:
        added = (
            Entry(
                "kernel",
                path,
                BY_PATH,
                "",
                BY_PATH,
                declaration=Declaration("kernel", path, path, op=op),
            )
            for op, path in found
        )
        super().__init__([*registry.entries, *added])
        self._found = found

    def load(self, entry: Entry) -> Any:
        """Return the object of a registered name or an import path."""
        if entry.package == BY_PATH:
            return self._found[entry.op, entry.name]
        return super().load(entry)


def with_import_paths(
    registry: Registry, paths: Sequence[tuple[str, str]], default_layout: str
) -> Registry:
    """Return `registry` with these import paths (op, path) as kernels.

    ConfigError when a path cannot be imported, or its target cannot be an implementation of the op.
    """
    layouts = dict.fromkeys([default_layout, *registry.names("layout")])
    return RegistryWithPaths(
        registry, {(op, path): _load(op, path, tuple(layouts)) for op, path in paths}
    )


def _load(op: str, path: str, layouts: Sequence[str]) -> Any:
    found = import_path(path, f"kernel of op {op}")
    return adapt_attention(found, path, layouts) if op == ATTENTION else found


def refuse_uncallable(
    op: Op[Any], impl: Any, what: str, error: type[InputError] = InputError
) -> None:
    """Raise `error` for an implementation that cannot be called with the op's signature."""
    given = f"{what} is of type {type(impl).__name__}"
    if callable(impl) and not isinstance(impl, type):
        reason = _why_not_called(op, impl)
        if reason is None:
            return
        given = f"{what}: {reason}"
    signature = f"{op.signature.__module__}.{op.signature.__qualname__}"
    raise error(
        given, f"a function by the protocol {signature}", "Give the function these arguments."
    )


def _why_not_called(op: Op[Any], function: Callable[..., Any]) -> str | None:
    """Return why a function cannot be called with the signature of the op, or None."""
    signature = inspect.signature(op.signature.__call__)
    _, *parameters = signature.parameters.values()
    by_name = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    by_place = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    try:
        inspect.signature(function).bind(*by_place, **dict.fromkeys(by_name))
    except TypeError as error:
        return f"{error}; calls are {op.name}{signature}"
    except ValueError:  # a callable without a readable signature: the quick check calls it
        pass
    return None


def import_path(path: str, what: str) -> Any:
    """Return the object at "module:attribute"; modules in the current folder come first, as with
    `python -m`.

    ConfigError says what is missing. An UnsupportedError that the module raises on import is passed
    on.
    """
    module, _, attribute = path.partition(":")
    if not all(part.isidentifier() for part in [*module.split("."), *attribute.split(".")]):
        raise ConfigError(
            f"{what} {path!r}", 'a name, or "package.module:attribute"', "Write module:attribute."
        )
    here = str(Path.cwd())
    if not {"", here} & set(sys.path):
        sys.path.insert(
            0, here
        )  # stays, because the module may import other modules of this folder later
    importlib.invalidate_caches()
    try:
        with guarded(f"module {module!r}"):
            found: Any = importlib.import_module(module)
    except UnsupportedError:
        raise
    except Exception as error:  # the module may raise anything
        raise ConfigError(
            f"{what} {path!r}: importing {module} failed: {reason_of(error)}",
            f"a module that can be imported, also from {here}",
            "Pass another path, or fix the module.",
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), n=1, cutoff=0.5)
            hint = f"Did you mean {near[0]!r}? " if near else ""
            public = (
                ", ".join(name for name in vars(found) if not name.startswith("_")) or "nothing"
            )
            raise ConfigError(
                f"{what} {path!r}: {module} has no {part!r}",
                public,
                f"{hint}Pass another attribute.",
            )
        found = getattr(found, part)
    return found


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
