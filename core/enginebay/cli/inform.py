"""plugins, explain, config and env: commands that show something and run no model."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from enginebay.cli.options import add_engine_arguments, config_from
from enginebay.config import EngineConfig, make_config, read_toml


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """The flags of the four commands."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    if name in ("explain", "config"):
        add_engine_arguments(parser)
    else:
        parser.add_argument("--config", metavar="FILE", help="TOML file to check; it changes nothing here")
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

    records = [entry.record() for entry in load_registry().entries]
    if args.json:
        _print_json(records)
    else:
        columns = ("kind", "name", "op", "package", "version", "distribution", "state", "reason")
        _print_table("", columns, [tuple(r[c] for c in columns) for r in records])


def _explain(args: argparse.Namespace) -> None:
    from enginebay.build.compose import make_engine, make_plan
    from enginebay.build.tuned import tuned_phases

    plan = make_plan(config_from(args))
    chosen, shards = plan.kernels, plan.placement.num_shards("kv_heads")
    specs = [spec.per_shard(shards) for spec in plan.model.info.attention.values()]
    tuned = tuned_phases(chosen.tuned, chosen.attention, chosen.env, specs, chosen.layout)
    memory = make_engine(plan).memory
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
        "tuned": [dataclasses.asdict(phase) for phase in tuned],
        "memory": dataclasses.asdict(memory),
    }
    if args.json:
        _print_json(record)
        return
    print(f"model {plan.checkpoint.folder} ({plan.model.info.family})")
    rows = [(r.setting, r.chosen, r.why, "; ".join(f"{n}: {w}" for n, w in r.refused)) for r in plan.reasons]
    _print_table("", ("setting", "chosen", "why", "not taken"), rows)
    for phase in tuned:
        print(f"attention.{phase.phase} {phase.implementation}: configurations: {phase.summary}")
        for entry in phase.entries:
            print(f"  {entry}")
    mib = {name.removesuffix("_bytes"): value / 2**20 for name, value in dataclasses.asdict(memory).items()}
    weights, cache, workspace, device = (
        f"{mib[n]:.0f} MiB" for n in ("weights", "cache", "workspace", "device")
    )
    print(
        f"memory of each device: weights {weights}, cache up to {cache}, working space {workspace}, of {device}"
    )


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
