"""The plugin registry: finds plugins, isolates broken ones, and finds and loads parts by name."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import time
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import pluggy
from pydantic import BaseModel, ValidationError

from enginebay.config_sections import AUTO
from enginebay.errors import ConfigError, PluginError, unknown_name
from enginebay.plugins import hooks
from enginebay.plugins.guard import guarded, reason_of
from enginebay.plugins.hooks import GROUP, Declaration
from enginebay.validation import describe_validation

PLUGINS_VARIABLE = "ENGINEBAY_PLUGINS"
"""Environment variable with the names of the entry points to load, separated by commas. When it is
not set, all are loaded.
"""

DISTRIBUTION = "enginebay"
"""The distribution that contains the built-in parts."""

State = Literal["ready", "unavailable", "broken"]

READABLE = ("tool_calls", "reasoning")
"""What formats may read."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One line of `enginebay plugins`: a part, or a plugin that could not be loaded (kind
    "plugin").
    """

    kind: str
    name: str
    package: str
    """Name of the entry point of the plugin."""
    version: str
    distribution: str
    state: State = "ready"
    reason: str = ""
    declaration: Declaration | None = None

    @property
    def op(self) -> str:
        """The op of a kernel, else ""."""
        return self.declaration.op if self.declaration else ""

    @property
    def built_in(self) -> bool:
        """Whether the part is in the distribution of enginebay itself."""
        return self.distribution == DISTRIBUTION

    @property
    def priority(self) -> int:
        """The priority that the part declares; 0 by default."""
        return int(self.capability("priority", 0))

    def capability(self, name: str, default: Any = None) -> Any:
        """Return the capability that the part declares under this name."""
        return self.declaration.capabilities.get(name, default) if self.declaration else default

    def is_of(self, kind: str) -> bool:
        """Return whether the part is of a kind; the kind may be a word of FORMER_KINDS."""
        today, reads_calls = hooks.FORMER_KINDS.get(kind, (kind, None))
        found = "tool_calls" in self.capability("reads", ())
        return self.kind == today and reads_calls in (None, found)

    def why_not_on(self, platform: str) -> str | None:
        """Return why the part cannot be used on a platform, or None when it can."""
        declared = self.declaration.platforms if self.declaration else ()
        if self.reason:
            return self.reason
        if declared and platform not in declared:
            return f"needs platform {' or '.join(declared)}, this is {platform}"
        return None

    def record(self) -> dict[str, str]:
        """Return the part's entry in the list that `enginebay plugins --json` prints."""
        fields = ("kind", "name", "op", "package", "version", "distribution", "state", "reason")
        return {name: getattr(self, name) for name in fields}


class Registry:
    """All parts of all loaded plugins. It is not changed after it was made."""

    def __init__(
        self, entries: Iterable[Entry], import_s: Mapping[str, float] | None = None
    ) -> None:
        """`import_s`: plugin -> seconds that importing its module and calling its hooks took."""
        self.entries = tuple(
            sorted(entries, key=lambda e: (e.kind, e.op, e.name, e.state != "ready"))
        )
        self.import_s = dict(import_s or {})

    def names(self, kind: str, op: str = "") -> list[str]:
        """Return the names of the parts of a kind (for kernels: of an op) that are not broken."""
        return [
            e.name for e in self.entries if (e.kind, e.op) == (kind, op) and e.state != "broken"
        ]

    def ready(self, kind: str) -> list[Entry]:
        """Return the usable parts of a kind, sorted by priority; for equal priorities, built-in
        parts first, then by name.
        """
        ready = [e for e in self.entries if (e.kind, e.state) == (kind, "ready")]
        return sorted(ready, key=lambda e: (-e.priority, not e.built_in, e.name))

    def find(self, kind: str, name: str, op: str = "") -> Entry:
        """Return the entry of a part without importing its code. `name` may be "package/name", for
        a name that two plugins use.

        UnknownNameError, which lists the known names, for an unknown name; PluginError for a part
        that is broken or unavailable.
        """
        package, _, plain = name.rpartition("/")
        same = [
            e
            for e in self.entries
            if (e.kind, e.op, e.name) == (kind, op, plain) and package in ("", e.package)
        ]
        if not same:
            self._raise_if_its_plugin_broke(kind, name)
            what = f"{kind} of op {op}" if op else kind
            raise unknown_name(
                what, name, self.names(kind, op), "`enginebay plugins` lists what is installed."
            )
        entry = same[0]
        if entry.state != "ready":
            raise PluginError(
                f"{kind} {name!r} cannot be used: {entry.reason}",
                ", ".join(self.names(kind, op)),
                "Fix this cause, or choose another name.",
            )
        return entry

    def _raise_if_its_plugin_broke(self, kind: str, name: str) -> None:
        package, _, plain = name.rpartition("/")
        for entry in self.entries:
            if entry.kind == "plugin" and entry.name == (package or plain):
                raise PluginError(
                    f"{kind} {name!r}: plugin {entry.name!r} could not be loaded: {entry.reason}",
                    ", ".join(self.names(kind)),
                    "Fix the plugin, or choose another name.",
                )

    def load(self, entry: Entry) -> Any:
        """Import the target of an entry. PluginError, with the reason, when the import fails."""
        assert entry.declaration is not None, "find() returns declared parts only"
        return import_target(
            entry.declaration.target, f"{entry.kind} {entry.name!r} of plugin {entry.package!r}"
        )

    def options(self, entry: Entry, values: Mapping[str, Any]) -> BaseModel | None:
        """Validate options with the part's own model; None for a part without options. ConfigError
        names each wrong option.
        """
        assert entry.declaration is not None, "find() returns declared parts only"
        what = f"{entry.kind} {entry.name!r}"
        if entry.declaration.options is None:
            if values:
                raise ConfigError(
                    f"options {', '.join(values)} for {what}",
                    "no options: this part has none",
                    "Leave these options out.",
                )
            return None
        model = import_target(entry.declaration.options, f"options of {what}")
        try:
            return model(**values)
        except ValidationError as error:
            raise ConfigError(f"{what}: {describe_validation(error, model)}") from None


def import_target(target: str, what: str) -> Any:
    """Import and return the attribute that "module:attribute" names. PluginError, with `what` and
    the reason, when the import fails.
    """
    module, _, attribute = target.partition(":")
    try:
        with guarded(what):
            found: Any = importlib.import_module(module)
            for part in attribute.split("."):
                found = getattr(found, part)
    except Exception as error:  # whatever a plugin's import raises must not take the host down
        raise PluginError(
            f"{what}: importing {target} failed: {reason_of(error)}",
            'a "module:attribute" that can be imported',
            "Fix the plugin, or install what the import needs.",
        ) from error
    return found


def load_registry(names: Iterable[str] | None = None) -> Registry:
    """Load the plugins with these names; None loads the plugins that ENGINEBAY_PLUGINS lists, or
    all.

    UnknownNameError for a name that is no entry point. A plugin that fails to load is listed as
    broken. Built-in plugins are loaded first, so that no other plugin can take their names.
    """
    points = sorted(importlib.metadata.entry_points(group=GROUP), key=_built_in_first)
    known = {point.name for point in points}
    if names is None:
        listed = os.environ.get(PLUGINS_VARIABLE, "").split(",")
        names = [name.strip() for name in listed if name.strip()] or known
    others = {point.name for point in points if _distribution(point)[0] != DISTRIBUTION}
    chosen = set(names) - (hooks.FORMER_PLUGINS - others)
    for name in sorted(chosen - known):
        raise unknown_name(
            "plugin", name, known, f"Correct the name in {PLUGINS_VARIABLE}, or install the plugin."
        )
    manager = hooks.make_manager()
    entries: list[Entry] = []
    import_s: dict[str, float] = {}
    for point in points:
        if point.name in chosen:
            start_s = time.perf_counter()
            entries += _load_plugin(manager, point, entries)
            import_s[point.name] = import_s.get(point.name, 0.0) + time.perf_counter() - start_s
    return Registry(_without_unknown_ops(entries), import_s)


def _without_unknown_ops(entries: list[Entry]) -> list[Entry]:
    """Mark every kernel whose op cannot be used as broken, with the reason."""
    ops = {e.name for e in entries if e.kind == "op" and e.state == "ready"}
    return [
        dataclasses.replace(e, state="broken", reason=_why_no_op(e, ops, entries))
        if e.kind == "kernel" and e.state != "broken" and e.op not in ops
        else e
        for e in entries
    ]


def _why_no_op(kernel: Entry, ops: set[str], entries: list[Entry]) -> str:
    """Return why the op of a kernel cannot be used: it is broken, or no plugin registered it."""
    for entry in entries:
        if (entry.kind, entry.name) == ("op", kernel.op):
            return f"op {entry.name!r} of plugin {entry.package!r} cannot be used: {entry.reason}"
    broken = [f"{e.name!r} ({e.reason})" for e in entries if e.kind == "plugin"]
    todo = "Correct the name of the op, or install the plugin that registers it."
    if broken:
        todo += f" These plugins could not be loaded, and may register it: {', '.join(broken)}."
    return str(unknown_name("op", kernel.op, ops, todo))


def _built_in_first(point: importlib.metadata.EntryPoint) -> tuple[bool, str, str]:
    distribution, _ = _distribution(point)
    return distribution != DISTRIBUTION, point.name, distribution


def _distribution(point: importlib.metadata.EntryPoint) -> tuple[str, str]:
    return _name_and_version(point.dist) if point.dist else ("unknown", "unknown")


@functools.lru_cache(maxsize=64)
def _name_and_version(distribution: importlib.metadata.Distribution) -> tuple[str, str]:
    """Return both; each property of a distribution parses its metadata anew. All entry points of
    one distribution have the same object.
    """
    return distribution.name, distribution.version


def _load_plugin(
    manager: pluggy.PluginManager, point: importlib.metadata.EntryPoint, before: list[Entry]
) -> list[Entry]:
    """Return the entries of one plugin, or one broken entry when its module or a hook fails."""
    distribution, version = _distribution(point)

    def broken(reason: str) -> list[Entry]:
        return [
            Entry(
                kind="plugin",
                name=point.name,
                package=point.name,
                version=version,
                distribution=distribution,
                state="broken",
                reason=reason,
            )
        ]

    if manager.has_plugin(point.name):
        return broken("another distribution has a plugin of this name")
    who = f"plugin {point.name!r}"
    try:
        with guarded(who):
            module = point.load()
            _refuse_former_hooks(module)
            manager.register(module, point.name)
        manager.check_pending()
    except Exception as error:  # noqa: BLE001  # one broken plugin never takes the host down
        if manager.has_plugin(point.name):
            manager.unregister(name=point.name)
        return broken(reason_of(error))
    if not manager.get_hookcallers(module):
        return broken(
            "it implements no hook of enginebay (are its functions marked with @hookimpl?)"
        )
    found: list[Declaration] = []

    def take(declaration: Declaration) -> None:
        check_declaration(declaration)
        found.append(declaration)

    others = [plugin for plugin in manager.get_plugins() if plugin is not module]
    kind = ""
    try:
        with guarded(who):
            for kind in hooks.INTERFACE_VERSIONS:
                caller = manager.subset_hook_caller(hooks.hook_name(kind), remove_plugins=others)
                caller(register=hooks.Register(kind, take))
    except Exception as error:  # noqa: BLE001  # as above
        return broken(f"{hooks.hook_name(kind)} failed: {reason_of(error)}")
    if not found:
        return broken("its hooks register no part")
    entries: list[Entry] = []
    origin = (point.name, version, distribution)
    taken = {(e.kind, e.op, e.name): e.package for e in before if e.state != "broken"}
    for one in found:
        state, reason = _state(one, distribution, taken)
        entries.append(Entry(one.kind, one.name, *origin, state, reason, one))
        if state != "broken":
            taken[one.kind, one.op, one.name] = point.name
    return entries


def _refuse_former_hooks(module: Any) -> None:
    """Raise PluginError for a hook of an earlier version, which nothing calls."""
    for name in hooks.FORMER_HOOKS.keys() & set(dir(module)):
        if hasattr(getattr(module, name, None), f"{GROUP}_impl"):
            todo = hooks.FORMER_HOOKS[name]
            allowed = "the hooks of enginebay.plugins.hooks"
            raise PluginError(f"the former hook {name}", allowed, f"Instead, {todo}.")


def _state(
    declaration: Declaration, distribution: str, taken: Mapping[tuple[str, str, str], str]
) -> tuple[State, str]:
    """Return the state of a declared part, and the reason when it is not ready. `taken`: the
    package of each part that is not broken, by kind, op and name.
    """
    wanted = hooks.INTERFACE_VERSIONS[declaration.kind]
    if declaration.interface != wanted:
        text = f"written for version {declaration.interface} of the {declaration.kind} interface"
        return "broken", f"{text}; this enginebay has version {wanted}"
    package = taken.get((declaration.kind, declaration.op, declaration.name))
    if package is not None:
        return "broken", f"the name is already taken by plugin {package!r}"
    missing = [module for module in declaration.requires if not _is_installed(module)]
    if missing:
        install = f"; install {distribution}[{declaration.extra}]" if declaration.extra else ""
        return "unavailable", f"needs {', '.join(missing)}{install}"
    return "ready", ""


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # the parent package is missing, or the name is malformed
        return False


def check_declaration(declaration: Declaration) -> None:
    """Raise PluginError for a declaration that would fail later, when the part is chosen."""
    name, op, target = declaration.name, declaration.op, declaration.target
    lists = (
        declaration.platforms,
        declaration.requires,
        declaration.capabilities.get("custom_calls", ()),
    )
    _check_capabilities(declaration)
    is_text = isinstance(name, str) and name.isprintable()
    is_name = is_text and name not in ("", AUTO) and not {"/", ":"} & set(name)
    is_target = isinstance(target, str) and ":" in target
    is_op = isinstance(op, str) and (declaration.kind == "kernel") == bool(op)
    are_lists = all(not isinstance(value, str) for value in lists)
    is_number = isinstance(declaration.capabilities.get("priority", 0), int)
    reads = declaration.capabilities.get("reads", ())
    tests = {
        "a name that is not auto and has no /, no : and no control characters": is_name,
        f'a target of the form "module:attribute", not {target!r}': is_target,
        f"an op for a kernel, and none for another kind, not {op!r}": is_op,
        "tuples for platforms, requires and custom_calls, not a single string": are_lists,
        "a whole number for the capability priority": is_number,
        f"a tuple of {', '.join(READABLE)} or both for the capability reads, not {reads!r}": (
            declaration.kind != "format" or _is_readable(reads)
        ),
    }
    for allowed, is_right in tests.items():
        if not is_right:
            todo = f"Correct {hooks.hook_name(declaration.kind)} of the plugin."
            raise PluginError(f"{declaration.kind} {name!r}", allowed, todo)


def _is_readable(reads: object) -> bool:
    """Return whether a format may declare that it reads this."""
    return isinstance(reads, tuple | list) and bool(reads) and all(one in READABLE for one in reads)


def _check_capabilities(declaration: Declaration) -> None:
    """Raise PluginError for an unknown capability: a misspelt one would be ignored silently."""
    what = f"{declaration.kind} {declaration.name!r}"
    known = ("priority", *hooks.CAPABILITIES.get(declaration.kind, ()))
    for capability in declaration.capabilities:
        if capability not in known and "." not in capability:
            todo = "Correct the name; a fact of the plugin's own has a dot, as in my_package.fact."
            raise PluginError(f"{what}: {unknown_name('capability', capability, known, todo)}")
