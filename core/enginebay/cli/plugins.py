"""plugins: lists all installed parts, whether they can be used here, and if not, why not."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path

from enginebay.cli.command import Command
from enginebay.cli.show import print_table
from enginebay.config import make_config
from enginebay.errors import unknown_name
from enginebay.plugins.hooks import FORMER_KINDS, INTERFACE_VERSIONS
from enginebay.plugins.registry import Entry, load_registry
from enginebay.toml_file import read_settings

DEVICE_FILES = {"cuda": ("/dev/nvidiactl", "/dev/dxg"), "tpu": ("/dev/accel0", "/dev/vfio/0")}
DEVICE_MODULES = {"cuda": ("jax_cuda12_plugin", "jax_cuda13_plugin"), "tpu": ("libtpu",)}


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the filters and the output flags."""
    parser.add_argument(
        "--kind", metavar="KIND", help="only parts of this kind, such as kernel (default: all)"
    )
    parser.add_argument(
        "--platform", metavar="NAME", help="only parts that run on this platform (default: all)"
    )
    parser.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="also print why a part cannot be used, and the Python package that installed it",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--config", metavar="FILE", help="TOML file to check; its values are not used"
    )
    parser.add_argument(
        "--timings",
        action="store_true",
        help="print the import time of each plugin in seconds, slowest first",
    )


def run(name: str, args: argparse.Namespace) -> int:
    """Print the parts."""
    if args.config:
        make_config(read_settings(args.config))
    registry = load_registry()
    if args.timings:
        _print_timings(registry.import_s, as_json=args.json)
        return 0
    kinds = ["plugin", *INTERFACE_VERSIONS]
    if args.kind is not None and args.kind not in (*kinds, *FORMER_KINDS):
        raise unknown_name("kind of part", args.kind, kinds)
    platforms = {entry.name for entry in registry.entries if entry.kind == "platform"}
    if args.platform is not None and args.platform not in platforms:
        raise unknown_name("platform", args.platform, platforms)
    here = (
        {name for name in platforms if has_device(name)}
        if args.platform is None
        else {args.platform}
    )
    shown = [
        e
        for e in registry.entries
        if (args.kind is None or e.is_of(args.kind)) and _fits(e, args.platform)
    ]
    records = [_record(entry, here) for entry in shown]
    if args.json:
        print(json.dumps(records, indent=2))
        return 0
    columns = ("kind", "name", "op", "package", "state")
    rows = [[record[column] for column in columns] for record in records]
    notes = (
        [[_note(record)] if _note(record) else [] for record in records] if args.verbose else None
    )
    print_table(columns, rows, notes)
    if not args.verbose and any(record["reason"] for record in records):
        print("`enginebay plugins -v` says why a part cannot be used here.")
    return 0


def has_device(platform: str) -> bool:
    """Return whether this machine may have a device of a platform, without importing JAX.

    Device files and installed modules decide. The CPU always has a device, and so has any platform
    of a plugin that this function does not know; `enginebay env` asks JAX.
    """
    if platform not in DEVICE_FILES:
        return True
    is_installed = any(importlib.util.find_spec(module) for module in DEVICE_MODULES[platform])
    return is_installed and any(Path(file).exists() for file in DEVICE_FILES[platform])


def _needs(entry: Entry) -> tuple[str, ...]:
    if entry.kind == "platform":
        return (entry.name,)
    return entry.declaration.platforms if entry.declaration else ()


def _fits(entry: Entry, platform: str | None) -> bool:
    return platform is None or not _needs(entry) or platform in _needs(entry)


def _record(entry: Entry, here: set[str]) -> dict[str, str]:
    """Return the entry's record; a part whose device is missing here is unavailable."""
    record, needs = entry.record(), _needs(entry)
    if record["state"] == "ready" and needs and not here & set(needs):
        record["state"] = "unavailable"
        record["reason"] = f"needs a device of platform {' or '.join(needs)}, which is not here"
    return record


def _note(record: Mapping[str, str]) -> str:
    from_where = f"{record['distribution']} {record['version']}"
    others = "" if record["distribution"] == "enginebay" else f"of {from_where}"
    return "; ".join(text for text in (record["reason"], others) if text)


def _print_timings(import_s: Mapping[str, float], *, as_json: bool) -> None:
    slowest = sorted(import_s.items(), key=lambda item: -item[1])
    if as_json:
        print(
            json.dumps(
                [{"plugin": name, "seconds": seconds} for name, seconds in slowest], indent=2
            )
        )
    else:
        print_table(("plugin", "seconds"), [(name, f"{seconds:.3f}") for name, seconds in slowest])


COMMAND = Command(add_arguments, run)
