"""plugins, explain, config and env: commands that show something and run no model."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from enginebay.cli.options import add_engine_arguments, config_from
from enginebay.config import EngineConfig, make_config, read_toml

if TYPE_CHECKING:
    from enginebay.build.tuned import BucketConfig


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """The flags of the four commands."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    if name in ("explain", "config"):
        add_engine_arguments(parser)
    else:
        parser.add_argument("--config", metavar="FILE", help="TOML file to check; it changes nothing here")
    if name == "plugins":
        parser.add_argument(
            "--timings",
            action="store_true",
            help="seconds that the import of each plugin took, slowest first",
        )
    if name == "config":
        parser.add_argument("--schema", action="store_true", help="print the JSON schema of configurations")


def run(name: str, args: argparse.Namespace) -> int:
    """Show it."""
    if name in ("plugins", "env") and args.config:
        make_config(read_toml(args.config))
    {"plugins": _plugins, "explain": _explain, "config": _config, "env": _env}[name](args)
    return 0


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def _print_table(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    table = Table(*columns, title=title, title_justify="left", box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    width = None if sys.stdout.isatty() else 200
    Console(width=width, highlight=False, markup=False).print(table)


def _plugins(args: argparse.Namespace) -> None:
    from enginebay.registry import load_registry

    registry = load_registry()
    if args.timings:
        _print_timings(registry.import_s, args)
        return
    records = [entry.record() for entry in registry.entries]
    if args.json:
        _print_json(records)
    else:
        columns = ("kind", "name", "op", "package", "version", "distribution", "state", "reason")
        _print_table("", columns, [tuple(r[c] for c in columns) for r in records])


def _print_timings(import_s: Mapping[str, float], args: argparse.Namespace) -> None:
    slowest = sorted(import_s.items(), key=lambda item: -item[1])
    if args.json:
        _print_json([{"plugin": name, "seconds": seconds} for name, seconds in slowest])
    else:
        _print_table("", ("plugin", "seconds"), [(name, f"{seconds:.3f}") for name, seconds in slowest])


def _explain(args: argparse.Namespace) -> None:
    from enginebay.build.compose import kernel_configs, make_engine, make_plan

    plan = make_plan(config_from(args))
    engine = make_engine(plan)
    memory, configs = engine.memory, kernel_configs(plan, engine)
    record = {
        "model": {
            "folder": str(plan.checkpoint.folder),
            "family": plan.model.info.family,
            "max_model_len": plan.model.info.max_model_len,
        },
        "choices": [
            {
                "setting": r.setting,
                "chosen": r.chosen,
                "why": r.why,
                "refused": [{"name": n, "reason": w} for n, w in r.refused],
            }
            for r in plan.reasons
        ],
        "kernel_configs": [
            {
                "setting": f"kernels.attention.{c.phase}",
                "chosen": c.implementation,
                "bucket": dataclasses.asdict(c.bucket),
                "page_size": c.layout.page_size,
                "source": c.source,
                "config": dataclasses.asdict(c.config) if c.config else None,
            }
            for c in configs
        ],
        "memory": dataclasses.asdict(memory),
    }
    if args.json:
        _print_json(record)
        return
    print(f"model {plan.checkpoint.folder} ({plan.model.info.family})")
    rows = [(r.setting, r.chosen, r.why, "; ".join(f"{n}: {w}" for n, w in r.refused)) for r in plan.reasons]
    _print_table("", ("setting", "chosen", "why", "not taken"), rows)
    _print_configs(configs)
    mib = {name.removesuffix("_bytes"): value / 2**20 for name, value in dataclasses.asdict(memory).items()}
    weights, cache, workspace, device = (
        f"{mib[n]:.0f} MiB" for n in ("weights", "cache", "workspace", "device")
    )
    print(
        f"memory of each device: weights {weights}, cache up to {cache}, working space {workspace}, of {device}"
    )


def _print_configs(configs: Sequence[BucketConfig]) -> None:
    """A line for each phase whose kernel has something to choose, and one for each bucket that is tuned."""
    for phase in dict.fromkeys(c.phase for c in configs):
        mine = [c for c in configs if c.phase == phase and c.source is not None]
        tuned = [c for c in mine if c.source != "default"]
        if mine:
            counts = f"{len(tuned)} tuned, {len(mine) - len(tuned)} default"
            print(f"configurations of attention.{phase} ({mine[0].implementation}), by bucket: {counts}")
        for one in tuned:
            print(f"  {one}")


def _config(args: argparse.Namespace) -> None:
    _print_json(EngineConfig.model_json_schema() if args.schema else config_from(args).model_dump())


def _env(args: argparse.Namespace) -> None:
    from enginebay.bench.environment import environment

    record = environment()
    if args.json:
        _print_json(record)
        return
    for key in ("enginebay", "python", "system"):
        print(f"{key}: {record[key]}")
    for package, version in record["packages"].items():
        print(f"{package}: {version}")
    print(f"devices: {', '.join(record['devices'])}")
