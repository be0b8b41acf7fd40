"""bench: measures engines, or implementations of an op, side by side in one process."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from contextlib import ExitStack
from typing import Any

from enginebay.cli.command import Command
from enginebay.cli.interrupts import INTERRUPTED
from enginebay.cli.options import (
    OWN_SAMPLING,
    add_engine_arguments,
    add_profile_argument,
    traced,
)
from enginebay.cli.show import print_shadow, print_table, progress
from enginebay.config import make_config
from enginebay.errors import InputError
from enginebay.toml_file import read_toml
from enginebay_bench.cli.kernels import (
    KERNEL_ROUNDS,
    OF_ENGINES,
    OF_KERNELS,
    add_kernel_arguments,
    refuse_flags,
    run_kernels,
)
from enginebay_bench.cli.listed import listed_variants
from enginebay_bench.cli.serve import run_serve
from enginebay_bench.cli.serve_flags import NUM_REQUESTS as NUM_SERVED
from enginebay_bench.cli.serve_flags import OF_SERVE, add_serve_arguments

ROUNDS = 3
NUM_REQUESTS = 32
OF_REQUESTS = ("prompt_len", "new_tokens", "num_requests")


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare what to measure and the engine flags; --engine, --scheduler, --attention and --dtype
    take lists.
    """
    parser.add_argument(
        "what",
        choices=["latency", "throughput", "kernels", "serve"],
        help="latency: one stream; throughput: a batch of mixed requests; "
        "kernels: implementations of an op; serve: a running server",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        metavar="N",
        help=f"number of rounds (default: {ROUNDS}; kernels: {KERNEL_ROUNDS})",
    )
    parser.add_argument(
        "--prompt-len",
        type=int,
        metavar="N",
        help="latency: tokens of the prompt; throughput: max tokens of a prompt "
        "(default: an eighth of the context)",
    )
    parser.add_argument(
        "--new-tokens",
        type=int,
        metavar="N",
        help="latency: tokens of the output; throughput: max tokens of an output "
        "(default: as --prompt-len)",
    )
    parser.add_argument(
        "--num-requests",
        type=int,
        metavar="N",
        help=f"throughput: requests in the batch (default: {NUM_REQUESTS}); "
        f"serve: requests of each load (default: {NUM_SERVED})",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_profile_argument(parser)
    add_kernel_arguments(parser.add_argument_group("kernels"))
    add_serve_arguments(parser.add_argument_group("serve"))
    add_engine_arguments(parser)


def run(name: str, args: argparse.Namespace) -> int:
    """Measure engines, kernels or a server."""
    if args.what == "serve":
        return run_serve(args)
    refuse_flags(args, f"bench {args.what}", "bench serve", OF_SERVE)
    if args.what == "kernels":
        refuse_flags(
            args, "bench kernels", "bench latency or throughput", (*OF_ENGINES, *OF_REQUESTS)
        )
        return run_kernels(args)
    refuse_flags(args, f"bench {args.what}", "bench kernels", (*OF_KERNELS, "seed"))
    return _run_engines(args)


def _run_engines(args: argparse.Namespace) -> int:
    """Measure every combination of the listed settings."""
    args.rounds = ROUNDS if args.rounds is None else args.rounds
    args.num_requests = NUM_REQUESTS if args.num_requests is None else args.num_requests
    from enginebay.serving import LLM
    from enginebay_bench.measure import latency_round, measure, throughput_round
    from enginebay_bench.workload import mixed_batch

    for flag in ("rounds", "prompt_len", "new_tokens", "num_requests"):
        value = getattr(args, flag)
        if value is not None and value < 1:
            raise InputError(
                f"--{flag.replace('_', '-')} {value}",
                "at least 1",
                f"Pass --{flag.replace('_', '-')} 1.",
            )
    with ExitStack() as stack, progress() as report, traced(args):
        llms: dict[str, LLM] = {}
        for variant, values in listed_variants(args):
            config = make_config(
                OWN_SAMPLING, read_toml(args.config) if args.config else {}, values
            )
            llms[variant] = stack.enter_context(LLM(config=config, progress=report))
        first = next(iter(llms.values()))
        context = first.config.max_model_len or 0
        prompt_len = args.prompt_len or context // 8
        new_tokens = args.new_tokens or prompt_len
        if prompt_len + new_tokens >= context:
            raise InputError(
                f"{prompt_len} prompt and {new_tokens} new tokens",
                f"fewer than {context} in total",
                "Lower --prompt-len or --new-tokens, or raise --max-model-len.",
            )
        latency = args.what == "latency"
        rounds = (
            latency_round(prompt_len, new_tokens)
            if latency
            else throughput_round(args.num_requests, prompt_len, new_tokens)
        )
        parity = mixed_batch(
            0, first.plan.model.info.num_token_ids, 4, min(64, prompt_len), min(32, new_tokens)
        )
        results = measure(llms, rounds, parity, args.rounds, report)
        shadows = {variant: llm.shadow_report() for variant, llm in llms.items()}
    records = [dataclasses.asdict(result) for result in results]
    is_cut = len(results) < len(llms) or any(
        len(v) < args.rounds for result in results for v in result.rounds.values()
    )
    print(json.dumps(records, indent=2)) if args.json else _print(records)
    for variant, shadow in shadows.items():
        print_shadow(shadow, f" with {variant}")
    if is_cut:
        print("interrupted: these are the results of the finished rounds", file=sys.stderr)
    return INTERRUPTED if is_cut else 0


def _print(records: list[dict[str, Any]]) -> None:
    figures = list(records[0]["figures"])
    columns = ("variant", *figures, "ratio to the first", "equal tokens", "warm-up s", "programs")
    rows = []
    reference = records[0]["figures"][figures[-1]]
    for record in records:
        values = [f"{record['figures'][f]:.4g}" for f in figures]
        equal = f"{record['equal_tokens']} of {record['compared_tokens']}"
        ratio = f"{record['figures'][figures[-1]] / reference:.2f}"
        last = f"{record['warmup_s']:.1f}", str(record["num_compiled"])
        rows.append((record["variant"], *values, ratio, equal, *last))
    print_table(columns, rows)
    print(
        "Medians; the ratio is of the last figure. "
        "Tokens of a narrow dtype may differ early: compare logits instead."
    )


COMMAND = Command(add_arguments, run)
