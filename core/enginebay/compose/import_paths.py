"""Unregistered parts by import path: "package.module:attribute" in place of the name of a kernel or
an executor.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from enginebay.compose.ops import ATTENTION
from enginebay.compose.simple_attention import adapt_attention
from enginebay.errors import ConfigError, InputError, UnsupportedError
from enginebay.ops.op import Op
from enginebay.ops.select import is_import_path
from enginebay.plugins.guard import guarded, reason_of
from enginebay.plugins.hooks import Declaration
from enginebay.plugins.registry import Entry, Registry

BY_PATH = "by import path"


class RegistryWithPaths(Registry):
    """A registry in which import paths are parts too. Their targets are imported when the registry
    is made.
    """

    def __init__(self, registry: Registry, found: Mapping[tuple[str, str, str], Any]) -> None:
        """`found`: (kind, op, import path) -> the object at the path."""
        added = (
            Entry(
                kind,
                path,
                BY_PATH,
                "",
                BY_PATH,
                declaration=Declaration(kind, path, path, op=op),
            )
            for kind, op, path in found
        )
        super().__init__([*registry.entries, *added])
        self._registry, self._found = registry, found

    def load(self, entry: Entry) -> Any:
        """Return the object of a registered name or an import path."""
        key = (entry.kind, entry.op, entry.name)
        if entry.package == BY_PATH and key in self._found:
            return self._found[key]
        return self._registry.load(entry)


def with_import_paths(
    registry: Registry, paths: Sequence[tuple[str, str]], default_layout: str
) -> Registry:
    """Return `registry` with these import paths (op, path) as kernels.

    ConfigError when a path cannot be imported, or its target cannot be an implementation of the op.
    """
    layouts = dict.fromkeys([default_layout, *registry.names("layout")])
    return RegistryWithPaths(
        registry, {("kernel", op, path): _load(op, path, tuple(layouts)) for op, path in paths}
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


def with_paths_of(
    registry: Registry, ops: Sequence[str], names: Sequence[str], layout: str
) -> Registry:
    """Return `registry` with those of `names` that are import paths as kernels of each of `ops`;
    the others name registered kernels. ConfigError for a path that cannot be imported.
    """
    paths = [(op, name) for op in ops for name in names if is_import_path(name)]
    return with_import_paths(registry, paths, layout) if paths else registry
