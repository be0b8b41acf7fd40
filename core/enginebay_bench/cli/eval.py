"""eval: compares a configuration with a reference on a text, at the level of the model's logits."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from enginebay.cli.command import Command
from enginebay.cli.options import (
    OWN_SAMPLING,
    add_engine_arguments,
    add_profile_argument,
    flag_values,
    split_pair,
    traced,
)
from enginebay.cli.show import print_table, progress
from enginebay.config import NO_QUANTIZATION, EngineConfig, make_config
from enginebay.config_sections import PHASES
from enginebay.errors import InputError
from enginebay.toml_file import read_settings

KEPT = ("model", "platform", "mesh", "axis_rules", "compile_cache", "generation_config")
SIZES = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "decode_steps")
"""Settings that the reference copies from the subject; all other settings are defaults."""

TEXTS = (
    "model", "platform", "dtype", "weight_dtype", "kv_cache_dtype", "quantization",
    "activation_quantization", "engine", "layout",
)  # fmt: skip
"""Keys of --reference whose values are names."""


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the text, its sizes, the reference, and the engine flags of the subject."""
    parser.add_argument(
        "--text", required=True, metavar="FILE", help="file with the text to score, in UTF-8"
    )
    parser.add_argument(
        "--reference",
        metavar="KEY=VALUE,...",
        help="settings of the reference, by default float32, nothing quantised and xla kernels; "
        f"keys: {', '.join(TEXTS)}, a size such as max_num_seqs, or an op, whose value is a "
        "kernel",
    )
    parser.add_argument(
        "--num-tokens",
        type=int,
        default=2048,
        metavar="N",
        help="max tokens of the text that are scored (default: 2048)",
    )
    parser.add_argument(
        "--passage-len",
        type=int,
        metavar="N",
        help="tokens scored together (default: as many as fit, at most 512)",
    )
    parser.add_argument(
        "--new-tokens",
        type=int,
        default=32,
        metavar="N",
        help="greedy tokens to generate after each passage (default: 32)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_profile_argument(parser)
    add_engine_arguments(parser)


def run(name: str, args: argparse.Namespace) -> int:
    """Score the text with both configurations, and print how they differ."""
    from enginebay.serving import LLM
    from enginebay_bench.evaluate import EvalSizes, evaluate

    text = read_text(args.text)
    for flag, least in (("num_tokens", 2), ("passage_len", 2), ("new_tokens", 1)):
        value = getattr(args, flag)
        if value is not None and value < least:
            raise InputError(
                f"--{flag.replace('_', '-')} {value}",
                f"at least {least}",
                f"Pass --{flag.replace('_', '-')} {least} or more.",
            )
    given = make_config(OWN_SAMPLING, read_settings(args.config), flag_values(args))
    config = given.model_copy(update={"shadow": {}})
    reference = reference_config(given, args.reference)
    sizes = EvalSizes(args.num_tokens, args.passage_len, args.new_tokens)
    with progress() as report, traced(args):
        found = evaluate(
            lambda: LLM(config=config, progress=report),
            lambda: LLM(config=reference, progress=report),
            text,
            sizes,
            report,
        )
    record = {
        "text": args.text,
        "subject": _settings(config),
        "reference": _settings(reference),
        **dataclasses.asdict(found),
    }
    print(json.dumps(record, indent=2)) if args.json else print_tables(record)
    return 0


def read_text(path: str) -> str:
    """Return the text of a file; InputError when the file is unreadable, not UTF-8, or empty."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"--text {path}: {error.strerror}", "a text file", "Pass the path of one."
        ) from None
    except UnicodeDecodeError as error:
        raise InputError(
            f"--text {path}: {error}", "UTF-8 text", "Convert the file to UTF-8."
        ) from None
    if not text.strip():
        raise InputError(f"--text {path}, which is empty", "a text", "Pass another file.")
    return text


def reference_config(subject: EngineConfig, given: str | None) -> EngineConfig:
    """Return the subject's model on its devices, in float32, with nothing quantised, xla kernels,
    default parts, and the changes in `given`.

    `given` is KEY=VALUE,...: a name for a key of TEXTS, a number for a size, or a kernel for an op
    or OP.PHASE. InputError for another key or value.
    """
    from enginebay.compose.ops import usable_ops
    from enginebay.plugins.registry import load_registry

    registry = load_registry()
    ops = sorted({e.op for e in registry.entries if e.kind == "kernel" and e.name == "xla"})
    fused = [op.name for op in usable_ops(registry)[0].values() if op.made_of]
    values: dict[str, Any] = {name: getattr(subject, name) for name in (*KEPT, *SIZES)}
    values |= {"dtype": "float32", "quantization": NO_QUANTIZATION}
    unnamed = (*fused, "kv_write")  # attention of xla writes the cache itself
    kernels: dict[str, dict[str, str]] = {
        op: dict.fromkeys(list(PHASES), "xla") for op in ops if op not in unnamed
    }
    for pair in given.split(",") if given else ():
        key, value = split_pair(pair, "--reference", "KEY=VALUE,...")
        op, _, phase = key.partition(".")
        if key in TEXTS:
            values[key] = value
        elif key in SIZES and value.isdecimal():
            values[key] = int(value)
        elif op in ops:
            kernels.setdefault(op, {}).update(
                dict.fromkeys([phase] if phase else list(PHASES), value)
            )
        else:
            raise InputError(
                f"--reference {pair}",
                f"{', '.join(TEXTS)}, or a number for {', '.join(SIZES)}, "
                f"or a kernel for {', '.join(ops)}",
                "Pass KEY=VALUE with one of these keys.",
            )
    return make_config({**values, "kernels": kernels})


def _settings(config: EngineConfig) -> dict[str, Any]:
    """Return the settings that distinguish a configuration, without unset fields."""
    kept = config.model_dump(exclude_defaults=True, exclude={"compile_cache", "dump_step"})
    return {"model": config.model, **kept}


def print_tables(record: dict[str, Any]) -> None:
    """Print the record of an evaluation, which `--json` prints as JSON, as tables."""
    sides = (record["stored_bytes"], record["reference_stored_bytes"])
    print_table(
        ("", "subject", "reference"),
        [
            ("perplexity", _figure(record["perplexity"]), _figure(record["reference_perplexity"])),
            ("weights, MiB", *(f"{side['weights'] / 2**20:.1f}" for side in sides)),
            ("cache, bytes of a token", *(f"{side['cache_of_token']:.0f}" for side in sides)),
        ],
    )
    rows: list[tuple[str, ...]] = []
    for name, what in (("prefill", "text (prefill)"), ("decode", "continuations (decode)")):
        figures = record[name]
        values = [_figure(figures[key]) for key in ("mean", "p50", "p90", "p99", "max")]
        rows.append((what, str(figures["num_positions"]), *values))
    print_table(("KL in nats", "positions", "mean", "p50", "p90", "p99", "max"), rows)
    rows = []
    for one in record["passages"]:
        agree = one["num_new"] if one["first_divergence"] is None else one["first_divergence"]
        rows.append(
            (f"from {one['start']}", str(one["num_tokens"]), f"{agree} of {one['num_new']}")
        )
    print_table(("passage", "tokens", "greedy tokens that agree"), rows)
    share = record["same_argmax"]
    print(
        f"The best token is the reference's at {'-' if share is None else f'{share:.2%}'} of the "
        "positions."
    )
    print(
        f"{record['num_scored']} tokens scored; the text has {record['num_text_tokens']}, "
        f"{record['num_cut_tokens']} were cut."
    )
    if record["num_nonfinite"]:
        print(f"{record['num_nonfinite']} positions have logits that are NaN or infinite.")


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


COMMAND = Command(add_arguments, run)
