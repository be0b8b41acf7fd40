"""generate: complete one prompt, printed as it comes, or as JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from typing import Any

from enginebay.cli.options import add_engine_arguments, config_from
from enginebay.cli.show import progress
from enginebay.errors import InputError, explain
from enginebay.llm import LLM
from enginebay.types import RequestMetrics, SamplingParams, make_sampling_params

DEFAULT_PROMPT = "Once upon a time"


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """The prompt, the sampling flags and the engine's."""
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help=f"text to complete (default: {DEFAULT_PROMPT!r}); - reads stdin")
    parser.add_argument("--prompt-ids", metavar="1,2,3", help="token ids instead of a text")
    parser.add_argument("--json", action="store_true", help="print one JSON object per completion")
    add_sampling_arguments(parser)
    add_engine_arguments(parser)


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags for SamplingParams."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, default=64, metavar="N", help="most new tokens")
    group.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy")
    group.add_argument("--top-k", type=int, default=0, metavar="K")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P")
    group.add_argument("--min-p", type=float, default=0.0, metavar="P")
    group.add_argument("--seed", type=int, metavar="S", help="equal seeds give equal samples")
    group.add_argument("-n", type=int, default=1, metavar="N", help="completions")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="text that ends the completion; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", help="run through end-of-sequence tokens")


def sampling_from(args: argparse.Namespace) -> SamplingParams:
    """SamplingParams of the flags; RequestError for a wrong value."""
    return make_sampling_params(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
        n=args.n,
        stop=tuple(args.stop),
        ignore_eos=args.ignore_eos,
    )


def run(name: str, args: argparse.Namespace) -> int:
    """Complete the prompt."""
    prompt, params = _prompt(args), sampling_from(args)
    config = config_from(args)
    with progress() as report:
        llm = LLM(config=config, progress=report)
    with llm:
        if args.json:
            _print_records(llm, prompt, params)
        elif params.n > 1:
            for completion in llm.generate([prompt], params)[0].outputs:
                print(f"[{completion.index}] {completion.text}")
        else:
            print(prompt if isinstance(prompt, str) else "", end="", flush=True)
            for chunk in llm.stream(prompt, params):
                print(chunk.delta_text, end="", flush=True)
            print()
    return 0


def _prompt(args: argparse.Namespace) -> str | list[int]:
    if args.prompt_ids is not None:
        if args.prompt is not None:
            raise InputError(explain("a prompt and --prompt-ids", "one of them", "Leave one out."))
        try:
            return [int(part) for part in args.prompt_ids.split(",")]
        except ValueError:
            raise InputError(explain(f"--prompt-ids {args.prompt_ids}", "numbers with commas between", "Correct them.")) from None
    if args.prompt == "-":
        return sys.stdin.read()
    return DEFAULT_PROMPT if args.prompt is None else str(args.prompt)


def _print_records(llm: LLM, prompt: str | list[int], params: SamplingParams) -> None:
    output = llm.generate([prompt], params)[0]
    for completion in output.outputs:
        record = {
            "text": completion.text,
            "token_ids": completion.token_ids,
            "prompt_token_ids": output.prompt_token_ids,
            "finish_reason": completion.finish_reason,
            "metrics": metrics_record(output.metrics),
        }
        print(json.dumps(record))


def metrics_record(metrics: RequestMetrics | None) -> dict[str, Any] | None:
    """Metrics with rates, nan as null."""
    if metrics is None:
        return None
    values = dataclasses.asdict(metrics) | {
        "time_to_first_token_s": metrics.time_to_first_token_s,
        "tokens_per_second": metrics.tokens_per_second,
    }
    return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in values.items()}
