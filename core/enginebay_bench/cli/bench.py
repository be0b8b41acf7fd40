"""bench: engines side by side on one of two workloads, implementations of an op, or a server."""

from __future__ import annotations

import argparse

from enginebay.cli.command import Command
from enginebay.cli.options import add_engine_arguments
from enginebay_bench.cli import compare
from enginebay_bench.cli.kernels import (
    KERNEL_ROUNDS,
    OF_ENGINES,
    OF_KERNELS,
    add_kernel_arguments,
    refuse_flags,
    run_kernels,
)
from enginebay_bench.cli.serve import run_serve
from enginebay_bench.cli.serve_flags import NUM_REQUESTS as NUM_SERVED
from enginebay_bench.cli.serve_flags import OF_SERVE, add_serve_arguments

BATCH = {"num_requests": 32, "new_tokens": 128}
"""What `bench throughput` measures where `compare` has one request of fewer tokens."""

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
        help=f"number of rounds (default: {compare.ROUNDS}; kernels: {KERNEL_ROUNDS})",
    )
    parser.add_argument(
        "--prompt-len",
        type=int,
        metavar="N",
        help="latency: tokens of the prompt; throughput: max tokens of a prompt "
        f"(default: {compare.PROMPT_LEN})",
    )
    parser.add_argument(
        "--new-tokens",
        type=int,
        metavar="N",
        help="latency: tokens of the output; throughput: max tokens of an output "
        f"(default: {compare.NEW_TOKENS}; throughput: {BATCH['new_tokens']})",
    )
    parser.add_argument(
        "--num-requests",
        type=int,
        metavar="N",
        help=f"throughput: requests in the batch (default: {BATCH['num_requests']}); "
        f"serve: requests of each load (default: {NUM_SERVED})",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
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
    refuse_flags(args, f"bench {args.what}", "bench kernels", OF_KERNELS)
    return _run_engines(args)


def _run_engines(args: argparse.Namespace) -> int:
    """Compare every combination of the listed settings."""
    if args.what == "latency":
        refuse_flags(args, "bench latency", "bench throughput", ("num_requests",))
    parser = argparse.ArgumentParser()
    compare.add_arguments("compare", parser)
    found = vars(parser.parse_args([])) | (BATCH if args.what == "throughput" else {})
    given = {name: value for name, value in vars(args).items() if value is not None}
    form = {"format": "json" if args.json else "table"}
    return compare.run_compare(argparse.Namespace(**found | given | form))


COMMAND = Command(add_arguments, run)
