"""Finding tables of tuned kernels: the user's folder, then the folder `tuned` of each package that brings kernels."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from enginebay.build.folders import cache_folder
from enginebay.config import AUTO
from enginebay.errors import ConfigError, explain
from enginebay.ops.bound import AttentionImpl
from enginebay.ops.caps import Env
from enginebay.ops.spec import AttnSpec
from enginebay.ops.tuning import Tunable, TunedConfigs, TunedMode, TunedTable, read_table, spec_key
from enginebay.registry import Entry, Registry

log = logging.getLogger("enginebay.build")

PACKAGE_FOLDER = "tuned"


def tuned_folder(choice: str) -> Path:
    """The folder of the user's own tables: one that is given, or below the user's cache."""
    return cache_folder() / PACKAGE_FOLDER if choice == AUTO else Path(choice).expanduser()


def table_name(op: str, impl: str, device_kind: str) -> str:
    """The file of a table; its name is for people, what counts is in it."""
    return f"{op}.{impl}.{re.sub(r'[^A-Za-z0-9]+', '-', device_kind).strip('-')}.json"


def load_tuned(registry: Registry, mode: TunedMode, folder: str) -> TunedConfigs:
    """All tables, the user's first. A broken one of the user's is a ConfigError, one of a package is left out.

    A package's tables are those in the folder `tuned` of the top-level package that its kernels' targets lie in; only
    tables of its own kernels count.
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
                log.warning("a table of package %s is left out: %s", package, error)
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
            explain(f"tuned_folder = {choice!r}", "a folder that is there", "Make it, or correct the path.")
        )
    tables = []
    for path in sorted(folder.glob("*.json")):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                explain(f"table of tuned kernels {path}: {error}", "a readable JSON file", "Remove it.")
            ) from None
        tables.append(read_table(text, str(path)))
    return tables


def _top_package(entry: Entry) -> str:
    assert entry.declaration is not None, "ready parts are declared"
    return entry.declaration.target.partition(":")[0].partition(".")[0]


def _shipped(package: str) -> list[Path]:
    """The tables of a package, found without importing it."""
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    return [path for folder in folders for path in sorted((Path(folder) / PACKAGE_FOLDER).glob("*.json"))]


@dataclasses.dataclass(frozen=True)
class TunedPhase:
    """What the tables hold for a phase's implementation: `entries` for these layers, in words, page sizes included.

    `summary` says what happens to a bucket that has no entry of its own.
    """

    phase: str
    implementation: str
    summary: str
    entries: tuple[str, ...] = ()


def tuned_phases(
    tuned: TunedConfigs,
    attention: Mapping[str, AttentionImpl],
    env: Env,
    specs: Sequence[AttnSpec],
    layout: str,
) -> tuple[TunedPhase, ...]:
    """Per phase: whether configurations are tuned, and for which buckets."""
    phases = []
    for phase, impl in attention.items():
        if not isinstance(impl, Tunable):
            phases.append(TunedPhase(phase, impl.name, "nothing to tune"))
            continue
        entries = _entries(tuned.of("attention", impl, env), phase, specs, layout)
        rest = "is an error" if tuned.mode == "require" else "gets the default"
        summary = (
            f"tuned; a bucket without an entry gets that of the next larger, or {rest.removeprefix('gets ')}"
        )
        phases.append(
            TunedPhase(phase, impl.name, summary if entries else f"default: every bucket {rest}", entries)
        )
    return tuple(phases)


def _entries(
    tables: Sequence[TunedTable], phase: str, specs: Sequence[AttnSpec], layout: str
) -> tuple[str, ...]:
    keys = [spec_key(spec) for spec in specs]
    return tuple(
        f"{e.bucket['tokens']} tokens, {e.bucket['seqs']} rows, context {e.bucket['max_kv_len']}, page size "
        f"{e.page_size}: {', '.join(f'{n} {v}' for n, v in e.config.items())} "
        f"({e.median_s / e.default_median_s:.2f} of the default's time)"
        for table in tables
        for e in table.entries
        if e.config is not None and e.spec in keys and e.layout == layout and e.bucket["mode"] == phase
    )
