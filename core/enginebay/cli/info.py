"""explain, config and env: commands that print information and run no model."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from enginebay.cli.command import Command
from enginebay.cli.options import add_engine_arguments, config_from
from enginebay.cli.show import print_table
from enginebay.config import EngineConfig, make_config
from enginebay.toml_file import read_settings

if TYPE_CHECKING:
    from enginebay.compose.kernel_configs import BucketConfig
    from enginebay.compose.stored_bytes import StoredBytes
    from enginebay.memory import MemoryPlan


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the command `name`."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    if name in ("explain", "config"):
        add_engine_arguments(parser)
    else:
        parser.add_argument(
            "--config",
            metavar="FILE",
            help="TOML file to check; its values are not used",
        )
        parser.add_argument(
            "--clear-programs",
            action="store_true",
            help="remove compiled programs from the user's cache folder first",
        )
    if name == "explain":
        parser.add_argument(
            "-v",
            "--verbose",
            action="store_true",
            help="also print the candidates that were refused, and why",
        )
        parser.add_argument(
            "--chat",
            metavar="FILE",
            help="print instead how much of each prompt of a conversation repeats the one before: "
            "FILE has messages, the body of a chat request, or a line of JSON for each of several",
        )
    if name == "config":
        parser.add_argument(
            "--schema", action="store_true", help="print the JSON schema of a configuration instead"
        )


def run(name: str, args: argparse.Namespace) -> int:
    """Print what the command `name` shows."""
    if name == "env" and args.config:
        make_config(read_settings(args.config))
    {"explain": _explain, "config": _config, "env": _env}[name](args)
    return 0


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def _explain(args: argparse.Namespace) -> None:
    if args.chat is not None:
        from enginebay.cli.chat_prefixes import explain_chat

        explain_chat(config_from(args), args.chat, as_json=args.json)
        return
    from enginebay.compose.composition import make_engine, make_plan
    from enginebay.compose.kernel_configs import kernel_configs
    from enginebay.compose.stored_bytes import count_stored_bytes
    from enginebay.memory import check_memory

    plan = make_plan(config_from(args))
    engine = make_engine(plan)
    memory, configs = engine.memory, kernel_configs(plan, engine)
    stored = count_stored_bytes(plan)
    first, later = engine.warmup_steps()
    cached = {group: spec.cache_dtype for group, spec in plan.model.info.attention.items()}
    record = {
        "model": {
            "folder": str(plan.checkpoint.folder),
            "family": plan.model.info.family,
            "max_model_len": plan.model.info.max_model_len,
        },
        "choices": [
            {
                "setting": r.setting,
                "chosen": r.chosen,
                "why": r.why,
                "refused": [{"name": n, "reason": w} for n, w in r.refused],
            }
            for r in plan.reasons
        ],
        "kernel_configs": [
            {
                "setting": f"kernels.attention.{c.phase}",
                "chosen": c.implementation,
                "bucket": dataclasses.asdict(c.bucket),
                "page_size": c.layout.page_size,
                "source": c.source,
                "config": dataclasses.asdict(c.config) if c.config else None,
            }
            for c in configs
        ],
        "memory": dataclasses.asdict(memory)
        | {"start_bytes": memory.start_bytes, "max_bytes": memory.max_bytes},
        "stored_bytes": dataclasses.asdict(stored),
        "cache": {"dtypes": cached, "num_tokens": engine.ledger.num_free_tokens},
        "steps": {"first": [str(key) for key in first], "later": [str(key) for key in later]},
    }
    if args.json:
        _print_json(record)
        check_memory(memory)  # as generate does, after what was chosen is seen
        return
    print(f"model {plan.checkpoint.folder} ({plan.model.info.family})")
    rows = [(r.setting, r.chosen, r.why) for r in plan.reasons]
    notes = (
        [[f"not {n}: {w}" for n, w in r.refused] for r in plan.reasons] if args.verbose else None
    )
    print_table(("setting", "chosen", "why"), rows, notes)
    if not args.verbose:
        print("`enginebay explain -v` lists the candidates that were refused, and why.")
    _print_configs(configs)
    _print_memory(memory, engine.ledger.num_free_tokens, cached.values())
    _print_stored(stored)
    if first:
        print(f"compiled steps: {len(first) + len(later)}; with these, requests are answered:")
        for key in first:
            print(f"  {key}")
    check_memory(memory)


def _print_memory(memory: MemoryPlan, num_tokens: int, dtypes: Iterable[str]) -> None:
    """Print the memory plan of an engine, and the tokens that its cache holds."""
    weights, cache, workspace, device = (
        f"{number / 2**20:.0f} MiB"
        for number in (
            memory.weights_bytes,
            memory.cache_bytes,
            memory.workspace_bytes,
            memory.device_bytes,
        )
    )
    print(f"memory of each device, {device}:")
    tokens = f"{num_tokens} tokens in {' and '.join(dict.fromkeys(dtypes))}"
    print(f"  weights {weights}, cache up to {cache} ({tokens}), working space {workspace}")
    if memory.runtime_bytes:
        start, most, runtime, programs = (
            f"{number / 2**20:.0f} MiB"
            for number in (
                memory.start_bytes,
                memory.max_bytes,
                memory.runtime_bytes,
                memory.programs_bytes,
            )
        )
        print(
            f"  resident at the start about {start}, at most {most}:\n"
            f"    interpreter and libraries {runtime}, compiled programs up to {programs}"
        )
    for tier in memory.tiers:
        size = f"up to {tier.max_bytes / 2**20:.0f} MiB ({tier.num_tokens} tokens)"
        print(f"  prefixes on the {tier.name} {size}{tier.folder and f' in {tier.folder}'}")


def _print_stored(stored: StoredBytes) -> None:
    """Print the bytes of weights and cache, beside those without quantisation if they differ."""
    weights = f"  weights take {stored.weights / 2**20:.1f} MiB"
    if stored.weights != stored.plain_weights:
        share = stored.weights / stored.plain_weights
        weights += f", {share:.0%} of the {stored.plain_weights / 2**20:.1f} MiB of plain weights"
    cache = f"a token takes {stored.cache_of_token:.0f} bytes of cache"
    if stored.cache_of_token != stored.plain_cache_of_token:
        share = stored.cache_of_token / stored.plain_cache_of_token
        cache += f", {share:.0%} of the {stored.plain_cache_of_token:.0f} of a plain one"
    print(f"{weights}; {cache}")


def _print_configs(configs: Sequence[BucketConfig]) -> None:
    """Print one line per phase whose kernel has a configuration, and one per tuned bucket."""
    for phase in dict.fromkeys(c.phase for c in configs):
        mine = [c for c in configs if c.phase == phase and c.source is not None]
        tuned = [c for c in mine if c.source != "default"]
        if mine:
            counts = f"{len(tuned)} tuned, {len(mine) - len(tuned)} default"
            print(
                f"configurations of attention.{phase} ({mine[0].implementation}), "
                f"by bucket: {counts}"
            )
        for one in tuned:
            bucket = one.bucket
            values = dataclasses.asdict(one.config).items() if one.config else ()
            print(
                f"  {bucket.tokens} tokens, {bucket.seqs} rows, context {bucket.max_kv_len}, "
                f"page size {one.layout.page_size}: {one.source} "
                f"{', '.join(f'{name} {value}' for name, value in values)}".rstrip()
            )


def _config(args: argparse.Namespace) -> None:
    _print_json(EngineConfig.model_json_schema() if args.schema else config_from(args).model_dump())


def _env(args: argparse.Namespace) -> None:
    from enginebay.cli.environment import clear_compiled_programs, environment

    if args.clear_programs:
        clear_compiled_programs()
    record = environment()
    if args.json:
        _print_json(record)
        return
    for key in ("enginebay", "python", "system"):
        print(f"{key}: {record[key]}")
    for package, version in record["packages"].items():
        print(f"{package}: {version}")
    print(f"devices: {', '.join(record['devices'])}")
    kept = record["compiled_programs"]
    size = f"{kept['bytes'] / 2**20:.1f} MiB in {kept['files']} files"
    print(f"compiled programs: {size}, in {kept['folder']}")


COMMAND = Command(add_arguments, run)
