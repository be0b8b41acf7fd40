"""Finding tables of tuned kernels: the user's folder, then the folder `tuned` of each package that
brings kernels.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from enginebay.cache import KVLayout
from enginebay.compose.folders import cache_folder
from enginebay.config_sections import AUTO
from enginebay.engine import AttentionProblem
from enginebay.errors import ConfigError
from enginebay.ops.bound import AttentionImpl
from enginebay.ops.caps import Env
from enginebay.ops.spec import AttnSpec, Bucket, Mode
from enginebay.ops.tuning import (
    Source,
    TunedConfigs,
    TunedMode,
    TunedTable,
    candidates_of,
    read_table,
)
from enginebay.registry import Entry, Registry

log = logging.getLogger("enginebay.compose")

PACKAGE_FOLDER = "tuned"


def tuned_folder(choice: str) -> Path:
    """The folder of the user's own tables: one that is given, or below the user's cache."""
    return cache_folder() / PACKAGE_FOLDER if choice == AUTO else Path(choice).expanduser()


def table_name(op: str, impl: str, device_kind: str) -> str:
    """The file of a table; its name is for people, what counts is in it."""
    return f"{op}.{impl}.{re.sub(r'[^A-Za-z0-9]+', '-', device_kind).strip('-')}.json"


def load_tuned(registry: Registry, mode: TunedMode, folder: str) -> TunedConfigs:
    """All tables, the user's first. A broken one of the user's is a ConfigError, one of a package
    is left out.

    A package's tables are those in the folder `tuned` of the top-level package that its kernels'
    targets lie in; only tables of its own kernels count.
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
            f"tuned_folder = {choice!r}", "a folder that is there", "Make it, or correct the path."
        )
    tables = []
    for path in sorted(folder.glob("*.json")):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"table of tuned kernels {path}: {error}", "a readable JSON file", "Remove it."
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
    return [
        path
        for folder in folders
        for path in sorted((Path(folder) / PACKAGE_FOLDER).glob("*.json"))
    ]


@dataclasses.dataclass(frozen=True)
class BucketConfig:
    """The configuration of a phase's attention kernel in one of an engine's buckets; None: there is
    nothing to choose.
    """

    phase: Mode
    implementation: str
    spec: AttnSpec
    bucket: Bucket
    layout: KVLayout
    config: Any
    source: Source | None

    def __str__(self) -> str:
        b = self.bucket
        where = (
            f"{b.tokens} tokens, {b.seqs} rows, context {b.max_kv_len}, "
            f"page size {self.layout.page_size}"
        )
        values = (
            ", ".join(f"{n} {v}" for n, v in dataclasses.asdict(self.config).items())
            if self.config
            else ""
        )
        return f"{where}: {self.source} {values}".rstrip()


def bucket_configs(
    tuned: TunedConfigs,
    attention: Mapping[str, AttentionImpl],
    env: Env,
    specs: Mapping[str, AttnSpec],
    problems: Iterable[AttentionProblem],
    *,
    num_shards: int = 1,
) -> list[BucketConfig]:
    """What each of an engine's problems gets, for each of its groups' `specs`. In mode "require"
    UnsupportedError for a miss.
    """
    found: dict[BucketConfig, None] = {}
    for bucket, layouts in problems:
        impl = attention[bucket.mode]
        for group, spec in specs.items():
            local = spec.per_shard(num_shards)
            layout = dataclasses.replace(
                layouts[group],
                num_kv_heads=local.num_kv_heads,
                num_pages=bucket.seqs * bucket.pages_per_seq,
            )
            here = (env, local, bucket, layout)
            config: Any = None
            source: Source | None = None
            if candidates_of(impl, *here):
                config, source = tuned.config("attention", impl, *here)
            found[BucketConfig(bucket.mode, impl.name, local, bucket, layout, config, source)] = (
                None
            )
    return list(found)
