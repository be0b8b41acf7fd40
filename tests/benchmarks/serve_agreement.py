"""Compares the figures of `enginebay bench serve` with those of NVIDIA's aiperf, on the same paced
server and in interleaved rounds.

    python -m venv /tmp/aiperf && /tmp/aiperf/bin/pip install aiperf
    python -m tests.benchmarks.serve_agreement --aiperf /tmp/aiperf/bin/aiperf

The server sends a token every 20 ms; its first token comes after 100 to 150 ms. In each round both
clients send 500 requests, 16 at a time, after a warm-up that opens all 16 connections. The
requests of all rounds are merged, and each figure is computed from them in the same way: medians
must agree within 3 %, p99 within 15 %. The p99 of 500 requests is the fifth largest, and one pause
of either client delays several first tokens at once, so a single round says little about it. Both
count the opening of a connection. bench serve counts from the time when a request is due, aiperf
from its sending. aiperf's inter-token latency is `tpot` here, and its inter-chunk latency is `itl`.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import enginebay_models
from tests.benchmarks.http_server import wait_for
from tests.ports import free_port

NUM_REQUESTS, NEW_TOKENS, CONCURRENCY = 500, 50, 16
WARMUP = 2 * CONCURRENCY
LIMITS = {0.5: 0.03, 0.99: 0.15}
"""How much a percentile may differ, by its share."""
METRICS = {
    "ttft_s": "time_to_first_token",
    "tpot_s": "inter_token_latency",
    "itl_s": "inter_chunk_latency",
    "e2e_s": "request_latency",
}
DEMO = Path(enginebay_models.__file__).with_name("demo")
"""A folder with a tokenizer: aiperf's own is downloaded."""


@dataclasses.dataclass(frozen=True)
class Round:
    """What a client measured in a round: seconds of each request by figure, and percentiles of the
    times between chunks by share.
    """

    requests: Mapping[str, Sequence[float]]
    itl_s: Mapping[float, float]


def main() -> int:
    """Print a row for each figure; 1 when one differs by more than its limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--aiperf", required=True, help="aiperf's program")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--num-requests", type=int, default=NUM_REQUESTS)
    args = parser.parse_args()
    ours: list[Round] = []
    theirs: list[Round] = []
    with paced_server() as url:
        for number in range(args.rounds):
            ways = [
                lambda: ours.append(measured_here(url, args.num_requests)),
                lambda: theirs.append(measured_by_aiperf(url, args.aiperf, args.num_requests)),
            ]
            for measure in ways if number % 2 == 0 else reversed(ways):
                start_s = time.monotonic()
                measure()
                print(f"round {number}: {time.monotonic() - start_s:.0f} s", file=sys.stderr)
    print("| figure | bench serve, ms | aiperf, ms | difference | limit | rounds |")
    print("|---|---|---|---|---|---|")
    is_right = True
    for name, (share, limit) in itertools.product(METRICS, LIMITS.items()):
        pairs = [
            merged([one], [other], name, share) for one, other in zip(ours, theirs, strict=True)
        ]
        mine, other = merged(ours, theirs, name, share)
        off = mine / other - 1
        is_right = is_right and abs(off) <= limit
        rounds = ", ".join(f"{100 * (one / two - 1):+.1f}" for one, two in pairs)
        cells = (f"{1e3 * mine:.2f}", f"{1e3 * other:.2f}", f"{100 * off:+.1f} %")
        what = f"{name[:-2]} p{100 * share:.0f}"
        print("|", " | ".join((what, *cells, f"{100 * limit:.0f} %", f"{rounds} %")), "|")
    return int(not is_right)


def merged(
    ours: Sequence[Round], theirs: Sequence[Round], name: str, share: float
) -> tuple[float, float]:
    """The percentile of a figure over the requests of some rounds, of both clients; of `itl_s` the
    median of the rounds' percentiles.
    """

    def of(rounds: Sequence[Round]) -> float:
        if name == "itl_s":
            return statistics.median(one.itl_s[share] for one in rounds)
        return percentile([value for one in rounds for value in one.requests[name]], share)

    return of(ours), of(theirs)


def percentile(values: Sequence[float], share: float) -> float:
    """The percentile 1 to 99 of values."""
    return statistics.quantiles(values, n=100, method="inclusive")[round(100 * share) - 1]


@contextmanager
def paced_server() -> Iterator[str]:
    """The address of a paced server in a process of its own."""
    port = free_port()
    command = [sys.executable, "-m", "tests.benchmarks.paced_server", "--port", str(port)]
    with subprocess.Popen([*command, "--ttft-ms", "100", "--spread-ms", "50"]) as process:
        try:
            wait_for(f"http://127.0.0.1:{port}/v1/models")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def measured_here(url: str, num_requests: int) -> Round:
    """The latencies that bench serve writes down."""
    with tempfile.TemporaryDirectory() as folder:
        program = [sys.executable, "-m", "enginebay", "bench", "serve", "--json", "--url", url]
        sizes = ["--prompt-len", "50", "--new-tokens", str(NEW_TOKENS), "--warmup", str(WARMUP)]
        load = ["--concurrency", str(CONCURRENCY), "--num-requests", str(num_requests)]
        out = run([*program, *sizes, *load, "--out", folder])
        rows = list(csv.DictReader(Path(folder, "requests.csv").read_text().splitlines()))
    (figures,) = json.loads(out)["loads"]
    assert figures["num_answered"] == len(rows) == num_requests
    found = {name: [float(row[name]) for row in rows] for name in METRICS if name != "itl_s"}
    return Round(found, {share: figures["itl_s"][f"p{100 * share:.0f}"] for share in LIMITS})


def measured_by_aiperf(url: str, aiperf: str, num_requests: int) -> Round:
    """The same of aiperf, whose records have milliseconds."""
    with tempfile.TemporaryDirectory() as folder:
        command = [aiperf, "profile", "--model", "paced", "--url", url, "--streaming"]
        command += ["--endpoint-type", "chat", "--tokenizer", str(DEMO), "--ui-type", "none"]
        command += ["--concurrency", str(CONCURRENCY), "--request-count", str(num_requests)]
        command += ["--warmup-request-count", str(WARMUP), "--synthetic-input-tokens-mean", "50"]
        command += ["--output-tokens-mean", str(NEW_TOKENS), "--use-server-token-count"]
        run([*command, "--output-artifact-dir", folder])
        lines = Path(folder, "profile_export.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    measured = [one for one in records if one["metadata"]["benchmark_phase"] != "warmup"]
    assert len(measured) == num_requests
    found: dict[str, list[float]] = {name: [] for name in METRICS}
    for name, record in itertools.product(METRICS, measured):
        metric = record["metrics"][METRICS[name]]
        assert metric["unit"] == "ms"
        values = metric["value"] if isinstance(metric["value"], list) else [metric["value"]]
        found[name] += [value / 1e3 for value in values]
    gaps = found.pop("itl_s")
    return Round(found, {share: percentile(gaps, share) for share in LIMITS})


def run(command: list[str]) -> str:
    """What a program prints."""
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main())
