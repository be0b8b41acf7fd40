"""compare: engines, kernels and other programs side by side on the same requests."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginebay.cli.command import Command
from enginebay.cli.interrupts import INTERRUPTED
from enginebay.cli.options import OWN_SAMPLING, add_engine_arguments, setting
from enginebay.cli.show import print_table, progress
from enginebay.config import make_config
from enginebay.errors import InputError
from enginebay.toml_file import read_settings
from enginebay_bench.cli.listed import listed_variants

if TYPE_CHECKING:
    from enginebay_bench.compare.comparison import Comparison
    from enginebay_bench.compare.variants import ComparedVariant

MAX_LIMIT_S = 1e6
PROMPT_LEN, NEW_TOKENS, ROUNDS = 128, 64, 10
FORMATS = ("table", "md", "csv", "json", "html")


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare what is compared on which requests, and what is made of it."""
    parser.add_argument(
        "--variant",
        metavar="NAME:KEY=VALUE,...",
        action="append",
        default=[],
        help="a further variant: the first one with these settings, without commas in values; may "
        "be repeated",
    )
    parser.add_argument(
        "--peer",
        metavar="NAME=WHAT",
        action="append",
        default=[],
        help="another program: http://ADDRESS[#MODEL], transformers:PYTHON, llama.cpp:PYTHON, "
        "openvino:PYTHON, vllm:PYTHON or command:PROGRAM; may be repeated",
    )
    parser.add_argument(
        "--reference", metavar="NAME", help="variant whose tokens are right (default: the first)"
    )
    parser.add_argument(
        "--prompt-len",
        metavar="N,...",
        default=str(PROMPT_LEN),
        help="tokens of the prompts; one or several",
    )
    parser.add_argument(
        "--new-tokens", type=int, metavar="N", default=NEW_TOKENS, help="tokens of an output"
    )
    parser.add_argument(
        "--num-requests",
        type=int,
        metavar="N",
        default=1,
        help="requests at once; with several, lengths are random, up to the given ones",
    )
    parser.add_argument(
        "--rounds", type=int, metavar="N", default=ROUNDS, help="rounds of each variant"
    )
    parser.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="seed of the prompts' tokens (default: a secret one, which is printed)",
    )
    parser.add_argument(
        "--limit-s",
        type=float,
        metavar="S",
        default=600.0,
        help="most seconds of a start, or of a run",
    )
    parser.add_argument(
        "--format", choices=FORMATS, default="table", help="form of what is printed"
    )
    parser.add_argument(
        "--output", metavar="FILE", help="file that keeps each run, in JSON lines (default: none)"
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue what --output has (default: off)"
    )
    parser.add_argument(
        "--read", metavar="FILE", help="print what such a file has, and run nothing (default: none)"
    )
    parser.add_argument(
        "--against",
        metavar="FILE",
        help="an older file; print speeds relative to it (default: none)",
    )
    add_engine_arguments(parser)


def run(name: str, args: argparse.Namespace) -> int:
    """Compare what the flags say."""
    return run_compare(args)


def run_compare(args: argparse.Namespace) -> int:
    """Compare, and print what was found; 1 if a variant is wrong or failed."""
    from enginebay_bench.compare.comparison import Comparison
    from enginebay_bench.compare.records import read_record

    older = read_record(args.against) if args.against else None
    if args.read:
        found = Comparison.of(read_record(args.read), older)
    else:
        found = _measured(args)
        if older is not None:
            found = Comparison.of(found.record, older)
    print(_formatted(found, args.format), end="")
    if not args.read and not found.is_whole:
        more = f"; --output {args.output} --resume continues them" if args.output else ""
        print(f"interrupted: these are the results so far{more}", file=sys.stderr)
        return INTERRUPTED
    return 0 if found.is_right else 1


def _measured(args: argparse.Namespace) -> Comparison:
    from enginebay_bench.compare.records import Cell, read_record
    from enginebay_bench.compare.session import compare

    for flag in ("new_tokens", "num_requests", "rounds"):
        if getattr(args, flag) < 1:
            written = flag.replace("_", "-")
            raise InputError(
                f"--{written} {getattr(args, flag)}", "at least 1", f"Pass --{written} 1."
            )
    lengths = str(args.prompt_len).split(",")
    if not all(length.isdecimal() and int(length) for length in lengths):
        raise InputError(
            f"--prompt-len {args.prompt_len}", "numbers of tokens", "Pass --prompt-len 128,2048."
        )
    each = dict.fromkeys(map(int, lengths))
    cells = [Cell(args.num_requests, length, args.new_tokens) for length in each]
    if not 0 < args.limit_s < MAX_LIMIT_S:
        raise InputError(
            f"--limit-s {args.limit_s}",
            f"more than 0, at most {MAX_LIMIT_S:g}",
            "Pass --limit-s 600.",
        )
    if args.seed is not None and args.seed < 0:
        raise InputError(f"--seed {args.seed}", "0 or more", "Pass --seed 7.")
    variants = _variants(args)
    names = [variant.name for variant in variants]
    if (twice := [one for one in names if names.count(one) > 1]) or (
        args.reference is not None and args.reference not in names
    ):
        raise InputError(
            f"two variants named {twice[0]}" if twice else f"--reference {args.reference}",
            f"a name of a variant ({', '.join(dict.fromkeys(names))}), each once",
            "Name the variants by --variant and --peer.",
        )
    if args.resume and args.output is None:
        raise InputError("--resume without --output", "the file to continue", "Pass --output FILE.")
    is_there = args.output is not None and Path(args.output).exists()
    if is_there and not args.resume:
        raise InputError(
            f"--output {args.output}, which exists",
            "a new file, or --resume",
            "Pass --resume to continue it, or name another file.",
        )
    with progress() as report:
        return compare(
            variants,
            cells,
            rounds=args.rounds,
            reference=args.reference,
            output=args.output,
            resumed=read_record(args.output) if is_there else None,
            limit_s=args.limit_s,
            command=shlex.join(["enginebay", *sys.argv[1:]]),
            report=report,
            seed=args.seed,
        )


def _variants(args: argparse.Namespace) -> list[ComparedVariant]:
    """The listed variants, those of --variant, and the peers."""
    from enginebay_bench.compare.variants import engine_variant, peer_variant

    file = read_settings(args.config)
    listed = listed_variants(args)
    base = listed[0][1]
    configs = {name: make_config(OWN_SAMPLING, file, values) for name, values in listed}
    found = [engine_variant(name, config) for name, config in configs.items()]
    for text in args.variant:
        name, colon, written = text.partition(":")
        if not (name and colon and written):
            raise InputError(
                f"--variant {text}",
                "NAME:KEY=VALUE,...",
                "For example --variant small:engine.page_size=32,dtype=bfloat16.",
            )
        layers: list[dict[str, Any]] = [setting(one) for one in written.split(",")]
        found.append(engine_variant(name, make_config(OWN_SAMPLING, file, base, *layers)))
    first = next(iter(configs.values()))
    dtype = first.dtype if first.dtype != "auto" else "float32"
    return [*found, *(peer_variant(text, first, str(dtype)) for text in args.peer)]


def _formatted(found: Comparison, form: str) -> str:
    from enginebay_bench.compare.page import page
    from enginebay_bench.compare.table import (
        cell_table,
        csv_text,
        json_text,
        markdown_text,
        remarks,
    )

    if form == "html":
        return page(found)
    if form == "md":
        return markdown_text(found)
    if form == "csv":
        return csv_text(found)
    if form == "json":
        return json_text(found) + "\n"
    for cell in found.record.cells:
        print(f"{cell.name}:")
        print_table(*cell_table(found, cell))
    return "\n".join(remarks(found)) + "\n"


COMMAND = Command(add_arguments, run)
