"""embed: print the pooled hidden states of texts, as numbers or as JSON."""

from __future__ import annotations

import argparse
import json
import sys
import typing
from contextlib import ExitStack

from enginebay.cli.command import Command
from enginebay.cli.generate import load_llm, read_stdin
from enginebay.cli.options import (
    add_engine_arguments,
    add_profile_argument,
    config_from,
    only_adapter,
    traced,
)
from enginebay.errors import InputError, explain
from enginebay.types import Pooling

POOLINGS: tuple[str, ...] = typing.get_args(Pooling)


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the texts, the pooling flags and the engine flags."""
    parser.add_argument(
        "prompts",
        nargs="*",
        metavar="PROMPT",
        help="text to embed; - reads one text per line of stdin",
    )
    parser.add_argument(
        "--pooling",
        choices=POOLINGS,
        default=POOLINGS[0],
        help="the mean over all tokens of a text, or the hidden state of its last token "
        f"(default: {POOLINGS[0]})",
    )
    parser.add_argument(
        "--normalize", action="store_true", help="divide each embedding by its Euclidean length"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per text")
    add_profile_argument(parser)
    add_engine_arguments(parser)


def run(name: str, args: argparse.Namespace) -> int:
    """Print one line per text: its numbers, or with --json an object with text and embedding."""
    given: list[str] = args.prompts
    prompts = read_stdin(sys.stdin.read).splitlines() if given == ["-"] else given
    if not prompts:
        raise InputError(explain("no text", "one or more", 'Write: enginebay embed "A text".'))
    config = config_from(args)
    with ExitStack() as bars, load_llm(bars, config) as llm, traced(args):
        found = llm.embed(
            prompts, pooling=args.pooling, normalize=args.normalize, lora=only_adapter(config)
        )
        bars.close()
        for prompt, embedding in zip(prompts, found, strict=True):
            numbers = embedding.tolist()
            if args.json:
                print(json.dumps({"prompt": prompt, "embedding": numbers}))
            else:
                print(*numbers)
    return 0


COMMAND = Command(add_arguments, run)
