"""chat: a conversation on the terminal, one line a turn; with messages or piped input it answers and ends."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator

from enginebay.cli.generate import (
    add_sampling_arguments,
    completion_record,
    print_whole,
    read_stdin,
    sampling_from,
)
from enginebay.cli.options import add_engine_arguments, add_profile_argument, config_from, traced
from enginebay.cli.show import progress
from enginebay.errors import InputError, explain
from enginebay.llm import LLM
from enginebay.types import SamplingParams


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Messages, the sampling flags and the engine's."""
    parser.add_argument(
        "message",
        nargs="*",
        metavar="MESSAGE",
        help="say these, one turn each, and end; none: read turns from stdin",
    )
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--json", action="store_true", help="print one JSON object per answer")
    add_sampling_arguments(parser)
    add_profile_argument(parser)
    add_engine_arguments(parser)


def run(name: str, args: argparse.Namespace) -> int:
    """Hold the conversation."""
    params = sampling_from(args)
    if params.n != 1:
        raise InputError(explain(f"-n {params.n} in a conversation", "1", "Leave it out."))
    if params.best_of not in (None, 1):
        given = f"--best-of {params.best_of} in a conversation, whose answers are printed as they come"
        raise InputError(explain(given, "1", "Leave it out."))
    config = config_from(args)
    with progress() as report:
        llm = LLM(config=config, progress=report)
    history = [{"role": "system", "content": args.system}] if args.system else []
    with llm, traced(args):
        for message in _turns(args.message, show_prompt=sys.stdin.isatty()):
            history.append({"role": "user", "content": message})
            history.append({"role": "assistant", "content": _answer(llm, history, params, as_json=args.json)})
    return 0


def _turns(given: list[str], *, show_prompt: bool) -> Iterator[str]:
    if given:
        for message in given:
            print(f"> {message}", file=sys.stderr)
            yield message
        return
    while True:
        if show_prompt:
            print("> ", end="", file=sys.stderr, flush=True)
        line = read_stdin(sys.stdin.readline)
        if not line:
            return
        if line.strip():
            yield line.strip()


def _answer(llm: LLM, history: list[dict[str, str]], params: SamplingParams, *, as_json: bool) -> str:
    if as_json:
        prompt_ids = llm.tokenizer.apply_chat_template(history)
        chunks = llm.stream(prompt_ids, params)
        (one,) = print_whole(chunks, 1, lambda one: json.dumps(completion_record(one, prompt_ids)))
        return one.output.text
    text = ""
    for chunk in llm.chat_stream(history, params):
        text += chunk.delta_text
        print(chunk.delta_text, end="", flush=True)
    print()
    return text
