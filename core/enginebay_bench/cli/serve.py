"""bench serve: load on an OpenAI-compatible server, measured from a client's side."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from typing import TYPE_CHECKING, Any

from enginebay.cli.interrupts import INTERRUPTED
from enginebay.cli.show import interruptible
from enginebay.cli.table_rows import Rows
from enginebay.errors import InputError, UnsupportedError
from enginebay.json_text import parse_json
from enginebay_bench.cli.kernels import OF_KERNELS, listed, refuse_flags
from enginebay_bench.cli.serve_flags import (
    API_KEY_ENV,
    CONCURRENCY,
    NEW_TOKENS,
    NUM_ALONE,
    NUM_REQUESTS,
    OF_SERVE,
    PREFIX_LEN,
    PROMPT_LEN,
    SHARE,
    SHARED,
    TIMEOUT_S,
    URL,
    WARMUP,
)
from enginebay_bench.cli.serve_results import make_record, show_results

if TYPE_CHECKING:
    from enginebay.contracts.text import Tokenizer
    from enginebay_bench.serve.bounds import Bounds
    from enginebay_bench.serve.figures import ServeFigures, Summary
    from enginebay_bench.serve.find_rate import FoundRate
    from enginebay_bench.serve.prompts import PromptSource
    from enginebay_bench.serve.run import Load, LoadRunner, Measurement
    from enginebay_bench.serve.target import ServerTarget

COLUMNS = (
    *("load", "answered", "failed", "requests/s", "tokens/s", "ttft ms p50/p90/p99"),
    *("tpot ms p50/p90/p99", "itl ms p50/p90/p99", "e2e ms p50/p90/p99", "within bounds"),
)


def run_serve(args: argparse.Namespace) -> int:
    """Measure every load, print a row for each, and write the results; 1 when no request of a load
    was answered.
    """
    refuse_flags(args, "bench serve", "bench kernels", OF_KERNELS)
    _refuse_engine_flags(args)
    _check_numbers(args)
    loads, bounds = _loads(args), _bounds(args)
    try:
        from enginebay_bench.serve.client import Client, probe_server
    except ImportError as error:
        if (error.name or "").split(".")[0] != "httpx":
            raise
        raise UnsupportedError(
            "bench serve without httpx",
            "an environment that has it",
            "Run: pip install 'enginebay[bench]'",
        ) from None
    from enginebay_bench.serve.run import LoadRunner

    tokenizer = _tokenizer(args.tokenizer)
    target, version = _target(args, probe_server)
    prompts, what = _prompts(args, tokenizer)
    sender = Client(target, args.timeout or TIMEOUT_S, tokenizer)
    found: FoundRate | None = None
    with (
        interruptible() as stop,
        LoadRunner(target, prompts, sender, bounds, _seed(args)) as runner,
    ):
        _warm_up(args, runner, loads[0])
        measure = _PrintedLoad(runner, None if args.json else Rows(COLUMNS, WIDTHS))
        if args.find_rate:
            assert bounds is not None, "_bounds refuses --find-rate without --slo"
            found = _search(args, measure, loads[0], bounds)
        else:
            for load in loads:
                measure(load)
    flags = _settled(args, target)
    record = make_record(
        flags, target, version, requests=what, bounds=bounds, measured=runner.measured, found=found
    )
    if stop.is_set():
        record["warnings"].insert(0, "Interrupted: the last load is a part.")
    show_results(record, runner.measured, json_only=args.json, folder=args.out)
    if stop.is_set():
        return INTERRUPTED
    return int(any(one.figures.num_answered == 0 for one in runner.measured))


def _warm_up(args: argparse.Namespace, runner: LoadRunner, first: Load) -> None:
    """Send the requests of --warmup, as many at a time as in the first load; InputError when one of
    them fails: so would the others.
    """
    num_requests = WARMUP if args.warmup is None else args.warmup
    at_once = first.concurrency or WARMUP
    error = runner.warm_up(num_requests, at_once) if num_requests else None
    if error is not None:
        raise InputError(
            f"a warm-up request failed: {error}",
            "a server that answers these requests",
            "Change the requests or the server; --warmup 0 measures failures too.",
        )


def _search(
    args: argparse.Namespace, measure: _PrintedLoad, first: Load, bounds: Bounds
) -> FoundRate:
    """The highest rate within the bounds."""
    from enginebay_bench.serve.find_rate import find_rate
    from enginebay_bench.serve.run import Load

    def is_within(load: Load) -> bool:
        share = measure(load).figures.good_share
        return share is not None and share >= bounds.share

    def holds(rate: float) -> bool:
        return is_within(Load(_num_requests(args, rate), rate=rate))

    def holds_alone() -> bool:
        num_requests = min(NUM_ALONE, args.num_requests or NUM_ALONE)
        return is_within(Load(num_requests, concurrency=1))

    assert first.rate is not None, "_loads makes loads of rates with --find-rate"
    return find_rate(holds, holds_alone, first.rate)


def _settled(args: argparse.Namespace, target: ServerTarget) -> dict[str, object]:
    """The flags that repeat the run, with the defaults that were used."""
    defaults = {
        "url": target.address,
        "model": target.model,
        "endpoint": target.endpoint,
        "seed": 0,
        "warmup": WARMUP,
        "timeout": TIMEOUT_S,
    }
    if args.requests is None:
        defaults |= {"prompt_len": PROMPT_LEN, "new_tokens": NEW_TOKENS}
        defaults |= {"prefix_len": PREFIX_LEN} if args.shared_prefixes else {}
    if args.duration is None:
        defaults["num_requests"] = NUM_REQUESTS
    if args.rates is None and not args.find_rate:
        defaults["concurrency"] = CONCURRENCY
    if args.slo is not None:
        defaults["slo_share"] = SHARE
    names = [name for name in (*SHARED, *OF_SERVE) if name not in ("json", "out")]
    given = {name: getattr(args, name) for name in names}
    found = {name: defaults.get(name) if v is None else v for name, v in given.items()}
    return {name: value for name, value in found.items() if value is not None}


WIDTHS = (14, 8, 6, 10, 8, 22, 22, 22, 24)


@dataclasses.dataclass(frozen=True)
class _PrintedLoad:
    """Measures a load, says so before, and prints its row."""

    runner: LoadRunner
    rows: Rows | None

    def __call__(self, load: Load) -> Measurement:
        given = f"{load.rate:.4g}/s" if load.rate else f"{load.concurrency} in flight"
        print(f"enginebay: {load.num_requests} requests, {given}", file=sys.stderr, flush=True)
        found = self.runner.measure(load)
        if self.rows is not None:
            self.rows.add(_cells(found.figures))
        return found


def _cells(f: ServeFigures) -> tuple[str, ...]:
    share = "-" if f.good_share is None else f"{100 * f.good_share:.1f} %"
    times = (_milliseconds(s) for s in (f.ttft_s, f.tpot_s, f.itl_s, f.e2e_s))
    counts = (f.load, str(f.num_answered), str(f.num_failed))
    return (*counts, f"{f.requests_per_s:.3g}", f"{f.output_tokens_per_s:.4g}", *times, share)


def _milliseconds(s: Summary | None) -> str:
    return "-" if s is None else " / ".join(f"{1e3 * v:.4g}" for v in (s.p50, s.p90, s.p99))


def _refuse_engine_flags(args: argparse.Namespace) -> None:
    """InputError for a flag that chooses parts of an engine: the server has made its choices."""
    known = {*OF_SERVE, *OF_KERNELS, *SHARED, "command", "what", "log_level"}
    others = [name for name in vars(args) if name not in known]
    refuse_flags(args, "bench serve", "`enginebay serve` with it", others)


def _check_numbers(args: argparse.Namespace) -> None:
    least = {
        **dict.fromkeys(("num_requests", "prompt_len", "new_tokens", "prefix_len"), 1),
        **dict.fromkeys(("shared_prefixes", "warmup", "seed", "length_spread"), 0),
        **dict.fromkeys(("duration", "timeout"), 0.001),
    }
    for name, smallest in least.items():
        value, flag = getattr(args, name), f"--{name.replace('_', '-')}"
        if value is not None and not value >= smallest:
            raise InputError(f"{flag} {value:g}", f"at least {smallest:g}", f"Raise {flag}.")
    if args.length_spread is not None and args.length_spread > 1:
        given = f"--length-spread {args.length_spread:g}"
        raise InputError(given, "0 to 1", "Pass --length-spread 0.5.")
    for one, other, todo in (
        ("rates", "concurrency", "Pass one of them."),
        ("find_rate", "concurrency", "Leave --concurrency out."),
        ("num_requests", "duration", "Pass one of them."),
        ("requests", "prompt_len", "Leave --prompt-len out."),
        ("requests", "length_spread", "Leave --length-spread out."),
        ("requests", "shared_prefixes", "Leave --shared-prefixes out."),
    ):
        if getattr(args, one) is not None and getattr(args, other) is not None:
            flags = f"--{one.replace('_', '-')} with --{other.replace('_', '-')}"
            raise InputError(flags, "one of the two", todo)
    if args.duration is not None and args.rates is None and not args.find_rate:
        raise InputError("--duration without rates", "--rates, or --find-rate", "Pass --rates 4.")
    if args.prefix_len is not None and not args.shared_prefixes:
        raise InputError(
            "--prefix-len without prefixes", "--shared-prefixes N", "Pass --shared-prefixes 4."
        )


def _loads(args: argparse.Namespace) -> list[Load]:
    from enginebay_bench.serve.run import Load

    if args.rates is None and not args.find_rate:
        found = _numbers("--concurrency", args.concurrency or str(CONCURRENCY), int)
        return [Load(args.num_requests or NUM_REQUESTS, concurrency=int(n)) for n in found]
    rates = _numbers("--rates", args.rates or "1", float)
    if args.find_rate and len(rates) > 1:
        given = f"--find-rate with --rates {args.rates}"
        raise InputError(given, "one rate, where the search begins", "Pass --rates 1.")
    return [Load(_num_requests(args, rate), rate=rate) for rate in rates]


def _num_requests(args: argparse.Namespace, rate: float) -> int:
    if args.duration is not None:
        return max(1, round(rate * args.duration))
    return int(args.num_requests or NUM_REQUESTS)


def _numbers(flag: str, text: str, kind: type[int | float]) -> list[float]:
    try:
        values = [kind(piece) for piece in listed(text)]
    except ValueError:
        values = []
    if not values or any(not 0 < value < float("inf") for value in values):
        what = "whole numbers" if kind is int else "numbers"
        raise InputError(
            f"{flag} {text}", f"{what} above 0 with commas between", f"Pass {flag} 1,2,4."
        )
    return list(values)


def _bounds(args: argparse.Namespace) -> Bounds | None:
    from enginebay_bench.serve.bounds import ALLOWED, parse_bounds

    if args.slo is not None:
        return parse_bounds(args.slo, SHARE if args.slo_share is None else args.slo_share)
    for flag in ("find_rate", "slo_share"):
        if getattr(args, flag) is not None:
            given = f"--{flag.replace('_', '-')} without --slo"
            raise InputError(given, f"--slo {ALLOWED}", "Pass --slo ttft=200ms,tpot=50ms.")
    return None


def _tokenizer(name: str | None) -> Tokenizer | None:
    """The tokenizer of a folder, a hub id or `demo`."""
    if name is None:
        return None
    from enginebay.compose.composition import open_checkpoint
    from enginebay.config import make_config
    from enginebay.plugins.registry import load_registry

    found: Tokenizer = open_checkpoint(load_registry(), make_config({}), name).load_tokenizer()
    return found


def _target(args: argparse.Namespace, probe: Any) -> tuple[ServerTarget, object]:
    """The server, and the version that it reports (None: it reports none)."""
    from enginebay_bench.serve.target import ServerTarget, parse_address

    address = parse_address(args.url or URL)
    extra: dict[str, Any] = {"ignore_eos": True} if args.ignore_eos else {}
    if args.body is not None:
        fields = parse_json(args.body)
        if not isinstance(fields, dict):
            raise InputError(
                f"--body {args.body}", "a JSON object", """Pass --body '{"temperature": 0}'."""
            )
        extra |= fields
    key = os.environ.get(args.api_key_env or API_KEY_ENV)
    target = ServerTarget(address, args.model or "", args.endpoint or "chat", extra, key)
    found = probe(address, target.headers)
    if not target.model:
        if not found["models"]:
            raise InputError(
                f"{address}/v1/models names no model", "a model's name", "Pass --model NAME."
            )
        target = dataclasses.replace(target, model=found["models"][0])
    return target, found["version"]


def _prompts(args: argparse.Namespace, tokenizer: Tokenizer | None) -> tuple[PromptSource, str]:
    """The requests, and what they are in words."""
    from enginebay_bench.serve.prompts import (
        FilePrompts,
        GeneratedPrompts,
        LengthRange,
        Prefixes,
        read_requests,
    )

    if args.requests is not None:
        file = FilePrompts(read_requests(args.requests, args.new_tokens, tokenizer), _seed(args))
        return file, f"{file.num_in_file} requests of {args.requests}"
    spread = args.length_spread or 0.0
    lengths = LengthRange(args.prompt_len or PROMPT_LEN, args.new_tokens or NEW_TOKENS, spread)
    prefixes = None
    text = f"random words: {lengths.prompt} to prompt, {lengths.new} new tokens at most"
    text += f", lengths spread by {spread:g}" if spread else ""
    if args.shared_prefixes:
        prefixes = Prefixes(args.shared_prefixes, args.prefix_len or PREFIX_LEN)
        text += f", behind one of {prefixes.count} prefixes of {prefixes.tokens}"
    return GeneratedPrompts(lengths, _seed(args), prefixes, tokenizer), text


def _seed(args: argparse.Namespace) -> int:
    return args.seed or 0
