"""tune: searches for the fastest configurations of kernels on this machine, and writes tables that
engines find.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from enginebay.cli.command import Command
from enginebay.cli.interrupts import INTERRUPTED
from enginebay.cli.show import interruptible, progress
from enginebay.cli.table_rows import Rows
from enginebay.config import make_config
from enginebay.config_sections import AUTO
from enginebay.errors import InputError
from enginebay.toml_file import read_settings
from enginebay_bench.cli.kernels import (
    Session,
    add_kernel_arguments,
    device_text,
    listed,
    open_session,
    print_roofline,
    refuse_flags,
    shapes_of,
    short,
)

if TYPE_CHECKING:
    from enginebay_bench.tune import Tuned

    Search = Callable[[], list[Tuned]]

COLUMNS = (
    *(
        "op",
        "shape",
        "dtype",
        "implementation",
        "configuration",
        "median ms",
        "default ms",
        "of roofline",
    ),
    *("tried", "refused, or why not"),
)

OF_SHAPES = (
    "shapes",
    "case",
    "trace",
    "target",
    "page_size",
    "lengths",
    "dtype",
    "platform",
    "layout",
)
"""Flags that --config replaces by the settings of the engine."""


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare what to search, on which shapes, and where to write the tables."""
    add_kernel_arguments(parser)
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="tune the kernels and buckets of the engine that this TOML file configures",
    )
    parser.add_argument("--platform", metavar="NAME", help="devices to run on (default: auto)")
    parser.add_argument(
        "--interpret",
        action="store_true",
        default=None,
        help="interpret kernels of --impl that are made for another platform (default: off)",
    )
    parser.add_argument(
        "--dtype", metavar="T,...", help="float32, bfloat16, float16 or auto (default: auto)"
    )
    parser.add_argument("--layout", metavar="NAME", help="cache layout (default: auto)")
    parser.add_argument("--rounds", type=int, metavar="N", help="number of rounds (default: 10)")
    parser.add_argument(
        "--compile-cache",
        metavar="DIR",
        help='folder of compiled programs, auto, or "off" (default: auto)',
    )
    parser.add_argument(
        "--tuned-folder",
        metavar="DIR",
        help="folder for the tables (default: auto, where engines find them)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(name: str, args: argparse.Namespace) -> int:
    """Search, write one table per implementation, and print the results."""
    from enginebay.compose.ops import ATTENTION
    from enginebay.compose.tuned_files import tuned_folder

    if args.config and args.op not in (None, ATTENTION):
        given = f"--op {args.op} with --config"
        fix = "Pass --shapes in place of --config to tune other ops."
        raise InputError(given, "attention, whose buckets come from an engine", fix)
    folder, args.tuned_folder = (
        args.tuned_folder,
        None,
    )  # existing tables must not change what is measured
    session, work = _of_engine(args) if args.config else _of_shapes(args)
    in_folder = "" if folder is None else f" {shlex.quote(f'--tuned-folder={folder}')}"
    session = dataclasses.replace(session, command=session.command + in_folder)
    found: list[Tuned] = []
    paths: list[Path] = []
    rows = Rows(COLUMNS, (9, 28, 8, 14, 24, 9, 10, 11, 5))
    with interruptible() as stop, progress() as report:
        for number, search in enumerate(work):
            if report is not None:
                report("tuning", number, len(work))
            fresh = search()
            found += fresh
            for one in fresh if not args.json else ():
                _print(rows, one)
            paths = _write(
                session, found, tuned_folder(folder or AUTO)
            )  # after each search, because a search may take hours
    if args.json:
        record = {
            "command": session.command,
            "roofline": dataclasses.asdict(session.bench.roofline),
            "tables": [str(path) for path in paths],
            "results": [
                dataclasses.asdict(one) | {"entry": one.entry and one.entry.model_dump()}
                for one in found
            ],
        }
        print(json.dumps(record, indent=2, default=float))
    else:
        print_roofline(session, session.bench.roofline)
        print(
            f"tables: {', '.join(map(str, paths)) or 'none; no implementation could be measured'}"
        )
    return INTERRUPTED if stop.is_set() else int(any(one.num_wrong or one.cheats for one in found))


def _of_shapes(args: argparse.Namespace) -> tuple[Session, list[Search]]:
    """Return the searches for the named shapes."""
    from enginebay.ops.tuned_tables import TunedConfigs
    from enginebay_bench.tune import tune_shape

    session = open_session(args, "tune", ragged=args.lengths != "full")
    off = {d: dataclasses.replace(s, tuned=TunedConfigs()) for d, s in session.settings.items()}
    bench = session.bench
    return session, [
        functools.partial(tune_shape, bench, op, shape, setting, session.candidates[op.name])
        for op in session.ops.values()
        for dtype, setting in off.items()
        for shape in shapes_of(args, op, dtype)
    ]


def _of_engine(args: argparse.Namespace) -> tuple[Session, list[Search]]:
    """Return the searches for the buckets of a configuration's engine, for its own kernels unless
    --impl names others.
    """
    from enginebay.compose.composition import make_engine, make_plan
    from enginebay.compose.kernel_configs import kernel_configs
    from enginebay.compose.ops import ATTENTION
    from enginebay.ops.tuned_tables import TunedConfigs
    from enginebay_bench.problem import TuningKey
    from enginebay_bench.tune import tune_bucket

    refuse_flags(args, "--config", "tune without it", OF_SHAPES)
    plan = make_plan(make_config(read_settings(args.config), {"tuned": "off"}))
    configs = kernel_configs(plan, make_engine(plan))
    args.platform, args.dtype, args.layout = (
        plan.platform.name,
        plan.config.dtype,
        plan.kernels.layout,
    )
    command = f"tune {shlex.quote(f'--config={args.config}')}"
    session = open_session(args, command, ragged=True, settled=OF_SHAPES)
    setting = dataclasses.replace(session.settings[plan.config.dtype], tuned=TunedConfigs())
    named = listed(args.impl or "")
    work: dict[TuningKey, Search] = {}
    for one in configs:
        wanted = named or ([one.implementation] if one.source is not None else [])
        candidates = [c for c in session.candidates[ATTENTION] if c.name in wanted]
        key = TuningKey(one.spec, one.bucket, one.layout)
        if candidates:
            work[key] = functools.partial(tune_bucket, session.bench, key, setting, candidates)
    return session, list(work.values())


def _write(session: Session, found: Sequence[Tuned], folder: Path) -> list[Path]:
    """Write a table for each implementation with entries, and keep older entries of its file."""
    from enginebay.cli.environment import environment
    from enginebay.compose.tuned_files import table_name
    from enginebay.ops.tuned_tables import TunedTable
    from enginebay_bench.tune import merge_tables, write_table

    device = device_text(session)
    by_impl: dict[tuple[str, str, str], list[Tuned]] = {}
    for one in found:
        if one.entry is not None:
            by_impl.setdefault((one.op, one.impl, one.version), []).append(one)
    paths = []
    for (op, impl, version), some in by_impl.items():
        table = TunedTable(
            op=op,
            impl=impl,
            version=version,
            device_kind=device,
            environment=environment(),
            command=session.command,
            entries=tuple(one.entry for one in some if one.entry is not None),
        )
        path = folder / table_name(op, impl, device)
        write_table(path, merge_tables(path, table))
        paths.append(path)
    return paths


def _print(rows: Rows, one: Tuned) -> None:
    start = (one.op, one.shape, one.dtype, one.impl)
    refused = "; ".join(f"{name}: {why}" for name, why in one.refused)
    if one.entry is None:
        rows.add((*start, "-", "", "", "", str(one.num_tried), one.reason or ""))
        return
    entry = one.entry
    config = "nothing to choose" if entry.config is None else short(entry.config)
    times = (f"{1e3 * entry.median_s:.4g}", f"{1e3 * entry.default_median_s:.4g}")
    rows.add((*start, config, *times, f"{100 * entry.roofline:.0f} %", str(one.num_tried), refused))


COMMAND = Command(add_arguments, run)
