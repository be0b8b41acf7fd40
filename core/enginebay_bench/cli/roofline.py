"""roofline: the measured rates of this machine, kept in the user's cache folder."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING

from enginebay.cli.command import Command
from enginebay.cli.show import print_table
from enginebay.config import make_config

if TYPE_CHECKING:
    from enginebay_bench.machine_rates import MachineRates


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare --platform, --json and --remeasure."""
    parser.add_argument(
        "--platform", metavar="NAME", help="platform whose first device is measured (default: auto)"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    parser.add_argument(
        "--remeasure",
        action="store_true",
        help="measure now, even if the rates of this machine are stored",
    )


def run(name: str, args: argparse.Namespace) -> int:
    """Print the rates of this machine."""
    from enginebay.compose.platforms import find_platform
    from enginebay.plugins.registry import load_registry
    from enginebay.waits import waiting
    from enginebay_bench import machine_rates
    from enginebay_bench.stored_rates import known_rates

    config = make_config({} if args.platform is None else {"platform": args.platform})
    platform = find_platform(load_registry(), config)
    with waiting("measuring the rates of this machine"):
        rates = known_rates(platform, machine_rates.SWEEP, remeasure=args.remeasure)
    if args.json:
        print(json.dumps({"machine": dataclasses.asdict(rates)}, indent=2))
    else:
        print_rates(rates)
    return 0


def print_rates(rates: MachineRates) -> None:
    """Print the rates as two tables, with a column for each number of processors."""
    each = [rates.all] if rates.one is None else [rates.one, rates.all]
    names = [f"on {count}" for count in (1, rates.num_processors)] if len(each) > 1 else [""]
    print(f"{rates.device}, measured; a launch takes {rates.all.launch_s * 1e6:.1f} us")
    print_table(
        ["size", *(f"{what} GB/s {n}".rstrip() for what in ("read", "copy") for n in names)],
        [
            [
                size_text(rows[0].num_bytes),
                *(f"{row.read_bytes_per_s / 1e9:.1f}" for row in rows),
                *(f"{row.copy_bytes_per_s / 1e9:.1f}" for row in rows),
            ]
            for rows in zip(*(one.memory for one in each), strict=True)
        ],
    )
    print()
    print_table(
        ["product of", "rows", *(f"GFLOP/s {n}".rstrip() for n in names)],
        [
            [rows[0].dtype, str(rows[0].num_rows), *(f"{r.flops_per_s / 1e9:.1f}" for r in rows)]
            for rows in zip(*(one.products for one in each), strict=True)
        ],
    )


def size_text(num_bytes: int) -> str:
    """Return a size with its binary unit, such as "16 KiB"."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:g} {unit}"
    return f"{num_bytes} B"


COMMAND = Command(add_arguments, run)
