"""What bench serve reports: the record of a run, its warnings, and the files."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from enginebay_bench.serve.bounds import Bounds
    from enginebay_bench.serve.find_rate import FoundRate
    from enginebay_bench.serve.run import Measurement
    from enginebay_bench.serve.target import ServerTarget

MANY_TOKENS = 1.5
"""A chunk of more tokens on average is reported."""


def make_record(
    flags: Mapping[str, object],
    target: ServerTarget,
    version: object,
    requests: str,
    bounds: Bounds | None,
    measured: Sequence[Measurement],
    found: FoundRate | None,
) -> dict[str, Any]:
    """The record that --json prints. `flags` repeat the run; `requests` says in words what they
    were, `version` is what the server reports of itself.
    """
    from enginebay.cli.environment import environment

    limits_s = None if bounds is None else bounds.limits_s
    share = None if bounds is None else bounds.share
    return {
        "command": command_of(flags),
        "when": dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "environment": environment(with_devices=False) | {"cpu_count": os.cpu_count()},
        "server": {
            "address": target.address,
            "model": target.model,
            "endpoint": target.endpoint,
            "version": version,
        },
        "settings": {"requests": requests, "bounds_s": limits_s, "bounds_share": share},
        "loads": [dataclasses.asdict(one.figures) for one in measured],
        "found_rate": None if found is None else found_record(found),
        "warnings": warnings_of(measured),
    }


def command_of(flags: Mapping[str, object]) -> str:
    """The command line of flags by name; a flag whose value is True has no value."""
    words = []
    for name, value in flags.items():
        flag = f"--{name.replace('_', '-')}"
        text = f"{value:g}" if isinstance(value, float) else str(value)
        words.append(flag if value is True else f"{flag}={text}")
    return f"enginebay bench serve {shlex.join(words)}"


def found_record(found: FoundRate) -> dict[str, Any]:
    """The result of a search, and a sentence about it."""
    held, failed = found.highest_held, found.lowest_failed
    if held is None:
        text = f"No rate holds the bounds; the lowest that was measured is {failed:.4g} requests/s."
    elif failed is None:
        text = (
            f"Every rate holds the bounds; the highest that was measured is {held:.4g} requests/s."
        )
    else:
        text = (
            f"The highest rate within the bounds is {held:.4g} requests/s; "
            f"{failed:.4g} requests/s is not within them."
        )
    return dataclasses.asdict(found) | {"text": text}


def warnings_of(measured: Sequence[Measurement]) -> list[str]:
    """A sentence for whatever puts figures in doubt."""
    found = []
    for f in (one.figures for one in measured):
        if f.is_client_slow:
            late = [1e3 * one.p99 for one in (f.lag_s, f.client_delay_s) if one is not None]
            found.append(
                f"{f.load}: this client was late by {max(late):.0f} ms (p99). Latencies "
                "include that; run it on a machine with free cores."
            )
        if f.num_failed:
            found.append(f"{f.load}: {f.num_failed} of {f.num_requests} requests failed.")
        if f.num_empty:
            found.append(f"{f.load}: {f.num_empty} answers had no text.")
        if "chunks" in f.tokens_counted_by:
            found.append(
                f"{f.load}: the server reports no usage, so each chunk counts as one token. "
                "Pass --tokenizer to count tokens."
            )
        elif f.num_chunks and f.num_output_tokens > MANY_TOKENS * f.num_chunks:
            found.append(
                f"{f.load}: a chunk has {f.num_output_tokens / f.num_chunks:.1f} tokens on "
                "average. itl is the time between chunks."
            )
    return found


def show_results(
    record: Mapping[str, Any],
    measured: Sequence[Measurement],
    *,
    json_only: bool,
    folder: str | None,
) -> None:
    """Print what the rows do not say, or all of it as JSON; write the files of --out."""
    from enginebay_bench.serve.files import write_results
    from enginebay_bench.serve.report import make_page

    if json_only:
        print(json.dumps(record, indent=2))
    else:
        for load in record["loads"]:
            for why, count in load["errors"].items():
                print(f"{load['load']}: {count} failed: {why}")
        for line in record["warnings"]:
            print(f"warning: {line}")
        cost = [load["client_cpu_us_per_token"] for load in record["loads"]]
        if any(cost):
            print(f"This client took {max(c for c in cost if c):.0f} us of CPU per token at most.")
        if record["found_rate"] is not None:
            print(record["found_rate"]["text"])
        print(f"again: {record['command']}")
    if folder is not None and measured:
        write_results(folder, record, measured, make_page(record, measured))
