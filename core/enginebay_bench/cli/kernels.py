"""bench kernels: flags that choose ops, implementations and shapes, and the table of results."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import shlex
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from enginebay.cli.interrupts import INTERRUPTED
from enginebay.cli.show import interruptible, progress
from enginebay.cli.table_rows import Rows
from enginebay.config import make_config
from enginebay.config_sections import AUTO
from enginebay.errors import InputError, unknown_name
from enginebay_testing.report import has_text

if TYPE_CHECKING:
    from enginebay.config import EngineConfig
    from enginebay.contracts.platform import Platform
    from enginebay.ops.caps import Env
    from enginebay.ops.op import Op
    from enginebay.ops.select import Candidate
    from enginebay.plugins.registry import Registry
    from enginebay_bench.kernels import Bench, Figure
    from enginebay_bench.problem import BenchSetting
    from enginebay_bench.roofline import Roofline
    from enginebay_bench.shapes import Shape
    from enginebay_runtime.call_trace import CallTrace
    from enginebay_testing.traced_cases import TracedShape

COLUMNS = (
    *("op", "shape", "dtype", "implementation", "median ms", "quartiles", "GB/s", "GFLOP/s"),
    *("of roofline", "bound by", "error", "against, or why not", "configuration"),
)
INTERPRETER = "interpreter"
"""The target name of interpreted kernels."""

KERNEL_ROUNDS = 10
CALL_S = 5.0
PAGE_SIZE = 64
SHAPES = (
    "smollm2-135m/decode/b1",
    "smollm2-135m/decode/b8",
    "smollm2-135m/prefill",
    "smollm2-135m/mixed/b8",
)
CONTEXT = "c1024"
DTYPES = ("float32", "bfloat16", "float16")

CONFIGURED = ("platform", "layout", "kv_cache_dtype", "tuned", "tuned_folder", "compile_cache")
"""Flags that set configuration values."""

OF_KERNELS = (
    *("op", "impl", "shapes", "case", "trace", "target", "page_size", "lengths", "max_call_s"),
)
OF_TRACES = ("shapes", "dtype", "page_size", "lengths")
"""Flags that --trace replaces by what was captured."""

OF_ENGINES = (
    *(
        "config",
        "model",
        "engine",
        "scheduler",
        "sampler",
        "attention",
        "kernel",
        "mesh",
        "max_model_len",
    ),
    *("max_num_seqs", "max_num_batched_tokens", "decode_steps", "verify_weights", "settings"),
)


def add_kernel_arguments(parser: argparse._ArgumentGroup | argparse.ArgumentParser) -> None:
    """Declare --op, --impl, --shapes and the settings of a measurement."""
    parser.add_argument("--op", metavar="OP,...", help="ops to measure (default: attention)")
    parser.add_argument(
        "--impl", metavar="NAME,...", help="implementations (default: all registered ones)"
    )
    parser.add_argument(
        "--shapes",
        metavar="SHAPE,...",
        help="MODEL/MODE/bROWS/cCONTEXT, without the last parts too, or all (default: small)",
    )
    parser.add_argument(
        "--case",
        metavar="TEXT",
        action="append",
        default=[],
        help="only shapes with TEXT in their names; * matches any characters; may be repeated "
        "(default: all)",
    )
    parser.add_argument(
        "--trace",
        metavar="FILE",
        help="the calls that --capture wrote into FILE, or a shipped trace, in place of --shapes "
        "(default: none)",
    )
    parser.add_argument(
        "--target",
        metavar="NAME",
        help="only implementations that run on this target: the platform, or interpreter "
        "(default: both)",
    )
    parser.add_argument(
        "--page-size",
        type=int,
        metavar="N",
        help=f"tokens per page of the cache (default: {PAGE_SIZE})",
    )
    parser.add_argument(
        "--lengths",
        choices=["full", "ragged"],
        help="length of the rows: the whole context, or ragged, between an eighth of it and all of "
        "it (default: full; tune: ragged)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="seed of the inputs (default: a secret one, which is printed); serve: seed "
        "of arrivals, lengths and words (default: 0)",
    )
    parser.add_argument(
        "--max-call-s",
        type=float,
        metavar="S",
        help=f"leave out shapes whose call takes longer than S seconds (default: {CALL_S:g})",
    )


def refuse_flags(args: argparse.Namespace, mode: str, other: str, flags: Sequence[str]) -> None:
    """Raise InputError for flags that only apply in another mode, because no flag is ignored."""
    given = [
        f"--{flag.replace('_', '-')}" for flag in flags if getattr(args, flag) not in (None, [])
    ]
    if given:
        raise InputError(
            f"{', '.join(given)} with {mode}",
            f"only flags of {mode}",
            f"Leave it out, or run {other}.",
        )


@dataclasses.dataclass(frozen=True)
class Session:
    """The settings of a run, and the command that repeats it."""

    bench: Bench
    settings: dict[str, BenchSetting]
    """Settings by dtype."""
    ops: dict[str, Op[Any]]
    """The requested ops, by name."""
    candidates: dict[str, list[Candidate]]
    """Implementations by op."""
    command: str


def listed(text: str) -> list[str]:
    """Return the parts of a comma-separated text, without repeats."""
    return list(dict.fromkeys(piece.strip() for piece in text.split(",") if piece.strip()))


def open_session(
    args: argparse.Namespace, command: str, *, ragged: bool, settled: Sequence[str] = ()
) -> Session:
    """Choose platform, layout and implementations (else InputError), and measure the machine.

    `command` is the command that runs, and `settled` names the flags whose values it fixes.
    """
    from enginebay.cli.environment import free_bytes
    from enginebay.compose.import_paths import with_paths_of
    from enginebay.compose.ops import ATTENTION
    from enginebay.compose.platforms import find_platform
    from enginebay.jax_config import configure_compile_cache
    from enginebay.plugins.registry import load_registry
    from enginebay_bench.kernels import Bench, ShapeLimits
    from enginebay_bench.roofline import measure_roofline
    from enginebay_testing.kernel_trial import drawn_seed
    from enginebay_testing.process_state import ProcessState

    _check_numbers(args)
    trace = read_trace(args)
    seed = drawn_seed() if args.seed is None else args.seed
    given = {name: getattr(args, name, None) for name in CONFIGURED}
    if trace is not None:
        given["layout"] = given["layout"] or trace.layout
    config = make_config({name: value for name, value in given.items() if value is not None})
    registry = load_registry()
    configure_compile_cache(config.compile_cache)
    platform = find_platform(registry, config)
    device, memory = platform.devices()[0], platform.hardware().memory_bytes
    names = listed(args.op or ATTENTION), listed(args.impl or "")
    before = ProcessState.now()
    registry = with_paths_of(registry, *names, platform.default_layout)
    ops, candidates = _candidates(args, registry, platform.env())
    before.restore()  # the trial of a kernel that changes the process names it
    _check_cases(args, ops.values())
    settings = _settings(args, registry, platform, config, ragged=ragged)
    settings = {d: dataclasses.replace(one, seed=seed) for d, one in settings.items()}
    candidates = {
        op: [_tried(op, one, seed, platform.name) for one in some]
        for op, some in candidates.items()
    }
    bench = Bench(
        measure_roofline(device, settings, platform.compile_options()),
        platform.compile_options(),
        args.rounds or KERNEL_ROUNDS,
        ShapeLimits(min(memory, free_bytes(device, memory)), args.max_call_s or CALL_S),
        device,
    )
    flags = {
        "op": ",".join(candidates),
        "impl": args.impl,
        "shapes": None if trace else args.shapes or ",".join(SHAPES),
        "trace": args.trace,
        "target": args.target,
        "dtype": None if trace else ",".join(settings),
        "platform": platform.name,
        "layout": next(iter(settings.values())).layout_name,
        "kv_cache_dtype": given["kv_cache_dtype"],
        "page_size": None if trace else args.page_size or PAGE_SIZE,
        "lengths": args.lengths,
        "rounds": bench.rounds,
        "max_call_s": f"{bench.limits.call_s:g}",
        "seed": seed,
        "tuned": given["tuned"],
        "tuned_folder": given["tuned_folder"],
        "compile_cache": given["compile_cache"],
    }
    given_flags = {
        flag: value for flag, value in flags.items() if value is not None and flag not in settled
    }
    words = [f"--{flag.replace('_', '-')}={value}" for flag, value in given_flags.items()]
    words += [f"--case={text}" for text in args.case] + ["--interpret"] * bool(args.interpret)
    return Session(bench, settings, ops, candidates, f"enginebay {command} {shlex.join(words)}")


def _tried(op: str, candidate: Candidate, seed: int, platform: str) -> Candidate:
    """Return a candidate that is not built in after its trial in a process of its own: it becomes
    unavailable if it cheats, or has no end.
    """
    from enginebay_bench.kernels import CHEAT
    from enginebay_testing.kernel_trial import KernelRequest, tried_apart

    if candidate.unavailable or candidate.built_in or candidate.interpreted:
        return candidate
    modules = ("enginebay_bench.cli.kernels", "enginebay_bench.tune")
    outcome = tried_apart(KernelRequest(op, candidate.name, seed, platform, modules))
    if outcome.verdict == "CHEAT":
        return dataclasses.replace(candidate, unavailable=f"{CHEAT}: {outcome.detail}")
    if outcome.verdict in ("ERROR", "TIMEOUT"):
        return dataclasses.replace(candidate, unavailable=outcome.detail)
    return candidate


def _candidates(
    args: argparse.Namespace, registry: Registry, env: Env
) -> tuple[dict[str, Op[Any]], dict[str, list[Candidate]]]:
    """Return the requested ops, and the requested implementations of each."""
    from enginebay.compose.candidates import candidates
    from enginebay.compose.ops import ATTENTION, usable_ops

    known_ops = {name: op for name, op in usable_ops(registry)[0].items() if op.bench is not None}
    ops = listed(args.op or ATTENTION)
    for op in ops:
        if op not in known_ops:
            raise unknown_name("op", op, known_ops, "Other ops have no benchmark.")
    wanted = listed(args.impl or "")
    if args.interpret and not wanted:
        given = "--interpret without --impl"
        raise InputError(given, "--interpret with --impl", "Pass --impl NAME.")
    may = wanted if args.interpret else ()
    found = {op: candidates(registry, op, env, interpret=may) for op in ops}
    known = {candidate.name for some in found.values() for candidate in some}
    for name in wanted:
        if name not in known:
            raise unknown_name(f"kernel of {', '.join(ops)}", name, known)
    chosen = {op: [c for c in some if not wanted or c.name in wanted] for op, some in found.items()}
    if args.target not in (None, env.platform, INTERPRETER):
        raise unknown_name("target", args.target, (env.platform, INTERPRETER))
    if args.target is not None:
        is_there = args.target == INTERPRETER
        chosen = {op: [c for c in some if c.interpreted == is_there] for op, some in chosen.items()}
    return {op: known_ops[op] for op in ops}, chosen


def _check_cases(args: argparse.Namespace, ops: Iterable[Op[Any]]) -> None:
    """Raise InputError, before any measurement, for a text of --case that no shape's
    name contains.
    """
    names = sorted({shape.name for op in ops for shape in shapes_of(args, op, every=True)})
    for text in args.case:
        if not any(has_text(name, text) for name in names):
            near = difflib.get_close_matches(text, names, n=3, cutoff=0.3) or names[:3]
            allowed = f"a part of a name, such as {', '.join(near)}"
            raise InputError(f"--case {text}", allowed, "Pass a part of one, or other --shapes.")


def _settings(
    args: argparse.Namespace,
    registry: Registry,
    platform: Platform,
    config: EngineConfig,
    *,
    ragged: bool,
) -> dict[str, BenchSetting]:
    """Return the common settings of the problems, by dtype."""
    from enginebay.compose.candidates import candidates
    from enginebay.compose.tuned_files import load_tuned
    from enginebay.ops.select import choose
    from enginebay_bench.problem import BenchSetting

    env = platform.env()
    dtypes = [platform.default_dtype if d == AUTO else d for d in listed(args.dtype or AUTO)]
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise unknown_name("dtype", dtype, (*DTYPES, AUTO))
    layout = platform.default_layout if config.layout == AUTO else config.layout
    cached = str(config.kv_cache_dtype)  # a flag names one for all groups
    needs = {"storages": {cached} - {AUTO, *DTYPES}}
    able = candidates(registry, "kv_write", env, layout=layout, needs=needs)
    writer, _ = choose("kernels.kv_write", AUTO, able, lambda _: None)
    first = BenchSetting(
        env,
        dtypes[0],
        layout,
        registry.load(registry.find("layout", layout)),
        writer.impl,
        args.page_size or PAGE_SIZE,
        ragged=ragged,
        cache_dtype=None if cached == AUTO else cached,
        tuned=load_tuned(registry, config.tuned, config.tuned_folder),
    )
    return {d: dataclasses.replace(first, dtype=d, min_rows=platform.min_rows(d)) for d in dtypes}


def _check_numbers(args: argparse.Namespace) -> None:
    if args.seed is not None and args.seed < 0:
        raise InputError(f"--seed {args.seed}", "0 or more", "Pass --seed 7.")
    for flag in ("rounds", "page_size", "max_call_s"):
        value = getattr(args, flag)
        if value is not None and value <= 0:
            given = f"--{flag.replace('_', '-')} {value}"
            raise InputError(given, "more than 0", f"Pass --{flag.replace('_', '-')} 1.")


def read_trace(args: argparse.Namespace) -> CallTrace | None:
    """Return the trace of --trace, and set --op and --dtype to what it has; None without one.
    InputError for flags that it replaces.
    """
    if args.trace is None:
        return None
    from enginebay.compose.ops import ATTENTION, usable_ops
    from enginebay.plugins.registry import load_registry
    from enginebay_testing.traced_cases import describe_trace, find_trace, traced_shapes

    refuse_flags(args, "--trace", "it without --trace", OF_TRACES)
    trace = find_trace(args.trace)
    print(describe_trace(trace), file=sys.stderr)
    called = [call.op for step in trace.steps for call in step.calls]
    has = [ATTENTION] if any(step.attention for step in trace.steps) else []
    has += dict.fromkeys(called)
    for op in listed(args.op or ""):
        if op not in has:
            raise unknown_name("op of the trace", op, has)
    ops = usable_ops(load_registry())[0]
    args.op = args.op or ",".join(op for op in has if op in ops and ops[op].bench is not None)
    shapes = (shape for op in listed(args.op) for shape in traced_shapes(trace, op))
    args.dtype = ",".join(dict.fromkeys(shape.dtype for shape in shapes))
    return trace


def shapes_of(
    args: argparse.Namespace, op: Op[Any], dtype: str | None = None, *, every: bool = False
) -> Sequence[Shape | TracedShape]:
    """Return the shapes of an op to measure: those of --trace in a dtype, or without --shapes a
    small model's, in one context; with --case the matching ones (or `every` one).
    """
    from enginebay_bench.problem import bench_of
    from enginebay_bench.shapes import parse_shapes

    texts = [] if every else args.case
    if args.trace is not None:
        from enginebay_testing.traced_cases import find_trace, traced_shapes

        calls = traced_shapes(find_trace(args.trace), op.name)
        found = [call for call in calls if dtype in (None, call.dtype)]
        return [s for s in found if not texts or any(has_text(s.name, text) for text in texts)]
    axes = bench_of(op).axes
    if not args.shapes:
        one = {mode: (1024,) if lens != (0,) else lens for mode, lens in axes.contexts.items()}
        axes = dataclasses.replace(axes, contexts=one)
    shapes = parse_shapes(listed(args.shapes) if args.shapes else list(SHAPES), axes)
    return [s for s in shapes if not texts or any(has_text(s.name, text) for text in texts)]


def run_kernels(args: argparse.Namespace) -> int:
    """Measure, and print the rows of each shape when it is measured; return 1 when a result is
    wrong. Refused implementations get a row too.
    """
    from enginebay.cli.environment import environment
    from enginebay_bench.kernels import is_faulty, judged, measure_shape

    session = open_session(args, "bench kernels", ragged=args.lengths == "ragged")
    work = [
        (op, dtype, shape)
        for op in session.ops.values()
        for dtype in session.settings
        for shape in shapes_of(args, op, dtype)
    ]
    figures: list[Figure] = []
    rows = Rows(COLUMNS, (9, 28, 8, 14, 9, 16))
    with interruptible() as stop, progress() as report:
        for number, (op, dtype, shape) in enumerate(work):
            if report is not None:
                report(f"measuring {op.name} of {shape.name}", number, len(work))
            setting = session.settings[dtype]
            found = measure_shape(session.bench, op, shape, setting, session.candidates[op.name])
            figures += found
            for figure in found if not args.json else ():
                _print(rows, judged(figure, session.bench.roofline))
    if args.json:
        roofline = session.bench.roofline if stop.is_set() else roofline_after(session)
        record = {
            "command": session.command,
            "environment": environment() | {"device": device_text(session)},
            "roofline": dataclasses.asdict(roofline),
            "figures": [dataclasses.asdict(judged(figure, roofline)) for figure in figures],
        }
        print(json.dumps(record, indent=2, default=float))
    else:
        print_roofline(session, session.bench.roofline)
    if stop.is_set():
        return INTERRUPTED
    return int(any(map(is_faulty, figures)))


def roofline_after(session: Session) -> Roofline:
    """Return the better of the session's measurement and a new one."""
    from enginebay_bench.roofline import measure_roofline

    bench = session.bench
    return bench.roofline.better(measure_roofline(bench.device, session.settings, bench.options))


def device_text(session: Session) -> str:
    """Return the device as platforms name it."""
    env = next(iter(session.settings.values())).env
    return env.device_kind or env.platform


def _print(rows: Rows, figure: Figure) -> None:
    f = figure
    start = (f.op, f.shape, f.dtype, f.implementation)
    if f.timing is None or f.parity is None or f.share is None:
        rows.add((*start, "-", "", "", "", "", "", "", f.reason or "", ""))
        return
    low, high = (1e3 * s for s in f.timing.quartiles_s)
    times = (f"{1e3 * f.timing.median_s:.4g}", f"{low:.4g} to {high:.4g}")
    rates = (f"{(f.bytes_per_s or 0) / 1e9:.3g}", f"{(f.flops_per_s or 0) / 1e9:.3g}")
    error = f"{f.parity.error:.2g} ({f.parity.share:.2g} of allowed)"
    if not f.parity.is_right:
        error = f"WRONG: {error}"
    tuned = f.config is not None and f.config_source != "default"
    config = f"{f.config_source}: {short(f.config)}" if tuned else ""
    share = f"{100 * f.share:.0f} %"
    rows.add((*start, *times, *rates, share, f.bound or "", error, f.parity.against, config))


def print_roofline(session: Session, roofline: Roofline) -> None:
    """Print the measured roofline, and the command that repeats the run."""
    flops = ", ".join(f"{d} {rate / 1e9:.0f} GFLOP/s" for d, rate in roofline.flops_per_s.items())
    rates = (
        f"reads {roofline.bytes_per_s / 1e9:.1f} GB/s, {flops}, a launch in "
        f"{roofline.launch_s * 1e6:.0f} us"
    )
    print(f"roofline of {device_text(session)}, measured: {rates}")
    print(f"again: {session.command}")


def short(config: Any) -> str:
    """Return a configuration as a short text."""
    return ", ".join(f"{name} {value}" for name, value in config.items())
