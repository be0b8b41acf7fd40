"""The flags of bench serve: the server, the requests, the load and the bounds."""

from __future__ import annotations

import argparse

URL = "http://127.0.0.1:8000"
NUM_REQUESTS = 200
CONCURRENCY = 8
WARMUP = 8
NUM_ALONE = 20
"""Requests that a search sends one after the other where its first rate does not hold."""

TIMEOUT_S = 600.0
PROMPT_LEN, NEW_TOKENS, PREFIX_LEN = 256, 128, 256
SHARE = 0.9
API_KEY_ENV = "OPENAI_API_KEY"

OF_SERVE = (
    *("url", "endpoint", "requests", "length_spread", "shared_prefixes", "prefix_len", "rates"),
    *("concurrency", "find_rate", "slo", "slo_share", "duration", "warmup", "timeout"),
    *("tokenizer", "body", "ignore_eos", "api_key_env", "out"),
)
"""Flags of this mode alone."""

SHARED = ("model", "prompt_len", "new_tokens", "num_requests", "json", "seed")
"""Flags of other modes that this one has too."""


def add_serve_arguments(parser: argparse._ArgumentGroup) -> None:
    """The server, the requests, the load, and where results go."""
    _add_target_arguments(parser)
    _add_load_arguments(parser)


def _add_target_arguments(parser: argparse._ArgumentGroup) -> None:
    for flag, metavar, what in (
        ("url", "URL", f"address of an OpenAI-compatible server (default: {URL})"),
        (
            "api-key-env",
            "NAME",
            f"environment variable that has the server's key (default: {API_KEY_ENV})",
        ),
        ("requests", "FILE", "requests of a file, ShareGPT or JSONL (default: random words)"),
        ("tokenizer", "DIR|ID", "counts tokens of prompts and answers here (default: the server)"),
        ("body", "JSON", "further fields of each request (default: none)"),
        ("out", "DIR", "folder for result.json, loads.csv, requests.csv, report.html (default: -)"),
    ):
        parser.add_argument(f"--{flag}", metavar=metavar, help=what)
    parser.add_argument(
        "--endpoint",
        choices=["chat", "completions"],
        help="endpoint to which requests are sent (default: chat)",
    )
    parser.add_argument(
        "--ignore-eos",
        action="store_true",
        default=None,
        help="send ignore_eos, so that each answer has its full length",
    )
    for flag, what in (
        ("shared-prefixes", "prefixes that the requests share (default: 0)"),
        ("prefix-len", f"tokens of each shared prefix (default: {PREFIX_LEN})"),
    ):
        parser.add_argument(f"--{flag}", type=int, metavar="N", help=what)
    parser.add_argument(
        "--length-spread",
        type=float,
        metavar="X",
        help="lengths are between 1 - X and 1 + X times --prompt-len and --new-tokens (default: 0)",
    )


def _add_load_arguments(parser: argparse._ArgumentGroup) -> None:
    for flag, metavar, what in (
        (
            "rates",
            "R,...",
            "requests per second, with Poisson arrivals; each rate of a list is measured",
        ),
        (
            "concurrency",
            "N,...",
            f"requests in flight; each number of a list is measured (default: {CONCURRENCY})",
        ),
        ("slo", "METRIC=TIME,...", "bounds, such as ttft=200ms,tpot=50ms (default: none)"),
    ):
        parser.add_argument(f"--{flag}", metavar=metavar, help=what)
    parser.add_argument(
        "--find-rate",
        action="store_true",
        default=None,
        help="find the highest rate at which the bounds of --slo hold; the first rate tried is "
        "that of --rates (default: 1)",
    )
    for flag, what in (
        ("slo-share", f"share of requests that must hold the bounds (default: {SHARE})"),
        ("duration", "seconds of arrivals at each rate, in place of --num-requests"),
        ("timeout", f"seconds until a request has failed (default: {TIMEOUT_S:g})"),
    ):
        parser.add_argument(f"--{flag}", type=float, metavar="X", help=what)
    for flag, what in (
        ("warmup", f"requests before the first load, left out of the figures (default: {WARMUP})"),
    ):
        parser.add_argument(f"--{flag}", type=int, metavar="N", help=what)
