"""Finds tables of tuned kernels: the user's folder, then the folder `tuned` of each package with
kernels.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from pathlib import Path

from enginebay.config_sections import AUTO
from enginebay.errors import ConfigError
from enginebay.folders import cache_folder
from enginebay.ops.tuned_tables import TunedConfigs, TunedMode, TunedTable, read_table
from enginebay.plugins.registry import Entry, Registry

log = logging.getLogger("enginebay.compose")

PACKAGE_FOLDER = "tuned"


def tuned_folder(choice: str) -> Path:
    """Return the folder of the user's own tables: the given one, or one in the user's cache."""
    return cache_folder() / PACKAGE_FOLDER if choice == AUTO else Path(choice).expanduser()


def table_name(op: str, impl: str, device_kind: str) -> str:
    """Return the file name of a table; it is for people, because only the content is read."""
    return f"{op}.{impl}.{re.sub(r'[^A-Za-z0-9]+', '-', device_kind).strip('-')}.json"


def load_tuned(registry: Registry, mode: TunedMode, folder: str) -> TunedConfigs:
    """Return all tables, the user's first. A broken table of the user raises ConfigError; a broken
    table of a package is left out.

    A package's tables are in the folder `tuned` of the top-level package that has the targets of
    its kernels; only tables of its own kernels are used.
    """
    if mode == "off":
        return TunedConfigs()
    tables = _user_tables(folder)
    packages: dict[str, set[tuple[str, str]]] = {}
    for entry in registry.entries:
        if entry.kind == "kernel" and entry.state == "ready":
            packages.setdefault(_top_package(entry), set()).add((entry.op, entry.name))
    for package, own in sorted(packages.items()):
        for path in _shipped(package):
            try:
                table = read_table(path.read_text(encoding="utf-8"), str(path))
            except (ConfigError, OSError, UnicodeDecodeError) as error:
                log.warning("ignoring a table of package %s: %s", package, error)
                continue
            if (table.op, table.impl) in own:
                tables.append(table)
    return TunedConfigs(tuple(tables), mode)


def _user_tables(choice: str) -> list[TunedTable]:
    folder = tuned_folder(choice)
    if not folder.is_dir():
        if choice == AUTO:
            return []
        raise ConfigError(
            f"tuned_folder = {choice!r}", "an existing folder", "Make the folder, or pass another."
        )
    tables = []
    for path in sorted(folder.glob("*.json")):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"table of tuned kernels {path}: {error}",
                "a readable JSON file",
                "Remove the file.",
            ) from None
        tables.append(read_table(text, str(path)))
    return tables


def _top_package(entry: Entry) -> str:
    assert entry.declaration is not None, "ready parts are declared"
    return entry.declaration.target.partition(":")[0].partition(".")[0]


def _shipped(package: str) -> list[Path]:
    """Return the table files of a package without importing it."""
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    return [
        path
        for folder in folders
        for path in sorted((Path(folder) / PACKAGE_FOLDER).glob("*.json"))
    ]
