"""roofline: the measured rates of this machine, kept in the user's cache folder, and the account of
an engine's steps at these rates.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING, Any

from enginebay.cli.command import Command
from enginebay.cli.options import OWN_SAMPLING, add_engine_arguments, flag_values
from enginebay.cli.show import print_table
from enginebay.config import make_config
from enginebay.errors import InputError
from enginebay.toml_file import read_settings

if TYPE_CHECKING:
    from enginebay.config import EngineConfig
    from enginebay.contracts.platform import Platform
    from enginebay_bench.machine_rates import MachineRates
    from enginebay_bench.step_account import StepAccount, StepSizes

SIZES = {
    "rows": "rows of the decode step (default: 1)",
    "context": "tokens in the cache of each row of the decode step (default: 128)",
    "prompt_len": "tokens of the prefill step (default: 128)",
    "rounds": "measurements of each step and op; the best counts (default: 10)",
}

NEW = 2
"""Tokens after the context: the token that a decode step computes, and the token it samples."""


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare --json, --remeasure, the sizes of the steps, and the flags that choose the parts."""
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    parser.add_argument(
        "--remeasure",
        action="store_true",
        help="measure now, even if the rates of this machine are stored",
    )
    for size, what in SIZES.items():
        flag = f"--{size.replace('_', '-')}"
        parser.add_argument(flag, type=int, metavar="N", help=f"with --model: {what}")
    add_engine_arguments(parser)


def run(name: str, args: argparse.Namespace) -> int:
    """Print the rates of this machine, and with a model the accounts of its steps."""
    from enginebay.compose.composition import make_plan
    from enginebay.compose.platforms import find_platform
    from enginebay.plugins.registry import load_registry
    from enginebay.waits import waiting
    from enginebay_bench.step_account import step_accounts

    accounts: list[StepAccount] = []
    if args.model is None and args.config is None:
        given = flag_values(args)
        refuse_without_model(args, given)
        rates = _rates(find_platform(load_registry(), make_config(given)), args)
    else:
        sizes = step_sizes(args)
        longest = max(sizes.context + NEW, sizes.prompt_len + 1)
        fitting = {"max_model_len": longest, "max_num_seqs": sizes.num_rows}
        fitting["max_num_batched_tokens"] = max(16, sizes.prompt_len)
        file = read_settings(args.config)
        config = make_config(OWN_SAMPLING, fitting, file, flag_values(args))
        check_sizes(sizes, config)
        plan = make_plan(config)
        rates = _rates(plan.platform, args)
        with waiting(f"measuring steps of {config.model} and their ops"):
            accounts = step_accounts(plan, sizes, rates)
    if args.json:
        record: dict[str, Any] = {"machine": dataclasses.asdict(rates)}
        if accounts:
            record["steps"] = [account_record(one) for one in accounts]
        print(json.dumps(record, indent=2))
        return 0
    if not accounts:
        print_rates(rates)
    for number, account in enumerate(accounts):
        print("\n" * bool(number), end="")
        print_account(account)
    return 0


def _rates(platform: Platform, args: argparse.Namespace) -> MachineRates:
    from enginebay.waits import waiting
    from enginebay_bench import machine_rates
    from enginebay_bench.stored_rates import known_rates

    with waiting("measuring the rates of this machine"):
        return known_rates(platform, machine_rates.SWEEP, remeasure=args.remeasure)


def refuse_without_model(args: argparse.Namespace, given: dict[str, Any]) -> None:
    """Raise InputError for flags of an engine or a step when no model is named."""
    named = [name for name in given if name != "platform"]
    named += [size for size in SIZES if getattr(args, size) is not None]
    if named:
        flags = ", ".join(f"--{one.replace('_', '-')}" for one in named)
        raise InputError(
            f"{flags} without a model",
            "--platform, --json and --remeasure, or a model whose steps are measured",
            "Pass --model demo, or leave it out.",
        )


def step_sizes(args: argparse.Namespace) -> StepSizes:
    """Return the sizes of the flags; InputError for a size below 1."""
    from enginebay_bench.step_account import StepSizes

    given = {size: getattr(args, size) for size in SIZES if getattr(args, size) is not None}
    for size, value in given.items():
        if value < 1:
            flag = f"--{size.replace('_', '-')}"
            raise InputError(f"{flag} {value}", "at least 1", f"Pass {flag} 1.")
    if "rows" in given:
        given["num_rows"] = given.pop("rows")
    return StepSizes(**given)


def check_sizes(sizes: StepSizes, config: EngineConfig) -> None:
    """Raise InputError for steps that an engine of this configuration does not run."""
    assert config.max_model_len is not None, "the command sets one"
    longest, batched = config.max_model_len, config.max_num_batched_tokens
    for flag, value, limit, setting in (
        ("--rows", sizes.num_rows, config.max_num_seqs, "max-num-seqs"),
        ("--context", sizes.context, longest - NEW, "max-model-len"),
        ("--prompt-len", sizes.prompt_len, longest - 1, "max-model-len"),
        ("--prompt-len", sizes.prompt_len, batched, "max-num-batched-tokens"),
    ):
        if value > limit:
            todo = f"Pass {flag} {limit}, or a larger --{setting}."
            raise InputError(f"{flag} {value}", f"at most {limit} with this --{setting}", todo)


def account_record(account: StepAccount) -> dict[str, Any]:
    """Return an account as JSON; predicted figures and measured ones have names of their own."""
    ops = [dataclasses.asdict(one) | {"share": one.share} for one in account.ops]
    sums = {"ideal_s": account.ideal_s, "ops_s": account.ops_s, "rest_s": account.rest_s}
    return dataclasses.asdict(account) | {"ops": ops} | sums


def print_account(account: StepAccount) -> None:
    """Print an account as a table, with the sum of the ops, the step, and what no op explains."""
    rate = account.read_bytes_per_s / 1e9
    print(f"{account.name}; program: rows {account.bucket.seqs}, tokens {account.bucket.tokens}")
    columns = (
        *("op", "kernel", "shapes", "calls", "MB", "MFLOP"),
        *("predicted us", "measured us", "of roofline", "bound by"),
    )
    rows = [
        [
            *(one.op, one.kernel, one.shapes, str(one.num_calls)),
            f"{(one.cost.bytes_read + one.cost.bytes_written) / 1e6:.3g}",
            f"{one.cost.flops / 1e6:.4g}",
            *(f"{one.ideal_s * 1e6:.2f}", f"{one.alone_s * 1e6:.1f}"),
            *(f"{100 * one.share:.0f} %", one.bound),
        ]
        for one in account.ops
    ]
    sums = [f"{account.ideal_s * 1e6:.2f}", f"{account.ops_s * 1e6:.1f}"]
    blank = [""] * 5
    rows.append(["all ops", *blank, *sums, f"{100 * account.ideal_s / account.ops_s:.0f} %", ""])
    rows.append(["the step", *blank, "", f"{account.step_s * 1e6:.1f}", "", ""])
    rows.append(["the rest", *blank, "", f"{account.rest_s * 1e6:.1f}", "", ""])
    print_table(columns, rows)
    print(
        f"ops take {100 * account.ops_s / account.step_s:.0f} % of the step; predictions read "
        f"{rate:.1f} GB/s"
    )


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
