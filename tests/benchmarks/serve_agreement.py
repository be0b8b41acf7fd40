"""Compares the figures of `enginebay bench serve` with those of NVIDIA's aiperf, on the same paced
server and in interleaved rounds.

    python -m venv /tmp/aiperf && /tmp/aiperf/bin/pip install aiperf
    python -m tests.benchmarks.serve_agreement --aiperf /tmp/aiperf/bin/aiperf

The server sends a token every 20 ms; its first token comes after 100 to 150 ms. Both clients send
500 requests with the same concurrency. Medians must agree within 3 %, p99 within 15 %. aiperf
counts from the sending of a request, as a closed loop here does. Its inter-token latency is `tpot`
here, and its inter-chunk latency is `itl`.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import enginebay_models
from tests.benchmarks.http_server import free_port, wait_for

NUM_REQUESTS, NEW_TOKENS, CONCURRENCY = 500, 50, 16
LIMITS = {"p50": 0.03, "p99": 0.15}
METRICS = {
    "ttft_s": "time_to_first_token",
    "tpot_s": "inter_token_latency",
    "itl_s": "inter_chunk_latency",
    "e2e_s": "request_latency",
}
DEMO = Path(enginebay_models.__file__).with_name("demo")
"""A folder with a tokenizer: aiperf's own is downloaded."""

Figures = dict[str, dict[str, float]]


def main() -> int:
    """Print a row for each figure; 1 when one differs by more than its limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--aiperf", required=True, help="aiperf's program")
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    print("| round | figure | bench serve, ms | aiperf, ms | difference | limit |")
    print("|---|---|---|---|---|---|")
    is_right = True
    with paced_server() as url:
        for number in range(args.rounds):
            ours, our_cpu_s = measured_here(url)
            theirs, their_cpu_s = measured_by_aiperf(url, args.aiperf)
            for name in METRICS:
                for percentile, limit in LIMITS.items():
                    mine, other = ours[name][percentile], theirs[name][percentile]
                    off = mine / other - 1
                    is_right = is_right and abs(off) <= limit
                    cells = (f"{1e3 * mine:.2f}", f"{1e3 * other:.2f}", f"{100 * off:+.1f} %")
                    row = (number, f"{name[:-2]} {percentile}", *cells, f"{100 * limit:.0f} %")
                    print(f"| {' | '.join(map(str, row))} |", flush=True)
            tokens = NUM_REQUESTS * NEW_TOKENS
            print(
                f"CPU of the whole process: bench serve {our_cpu_s:.1f} s "
                f"({1e6 * our_cpu_s / tokens:.0f} us per token), aiperf {their_cpu_s:.1f} s "
                f"({1e6 * their_cpu_s / tokens:.0f} us per token)",
                file=sys.stderr,
            )
    return int(not is_right)


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


def run(command: list[str]) -> tuple[str, float]:
    """What a program prints, and the CPU seconds of it and the processes that it waited for."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done.stdout, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measured_here(url: str) -> tuple[Figures, float]:
    """The latencies of bench serve, in seconds, and its CPU seconds."""
    sizes = ["--prompt-len", "50", "--new-tokens", str(NEW_TOKENS)]
    load = ["--concurrency", str(CONCURRENCY), "--num-requests", str(NUM_REQUESTS)]
    program = [sys.executable, "-m", "enginebay", "bench", "serve", "--json", "--url", url]
    out, cpu_s = run([*program, *sizes, *load])
    (figures,) = json.loads(out)["loads"]
    assert figures["num_answered"] == NUM_REQUESTS
    return {name: figures[name] for name in METRICS}, cpu_s


def measured_by_aiperf(url: str, aiperf: str) -> tuple[Figures, float]:
    """The same of aiperf, whose record has milliseconds."""
    with tempfile.TemporaryDirectory() as folder:
        command = [aiperf, "profile", "--model", "paced", "--url", url, "--streaming"]
        command += ["--endpoint-type", "chat", "--tokenizer", str(DEMO), "--ui-type", "none"]
        command += ["--concurrency", str(CONCURRENCY), "--request-count", str(NUM_REQUESTS)]
        command += ["--warmup-request-count", "8", "--synthetic-input-tokens-mean", "50"]
        command += ["--output-tokens-mean", str(NEW_TOKENS), "--use-server-token-count"]
        command += ["--output-artifact-dir", folder]
        _, cpu_s = run(command)
        record = json.loads(Path(folder, "profile_export_aiperf.json").read_text())
    found: Figures = {}
    for name, theirs in METRICS.items():
        assert record[theirs]["unit"] == "ms"
        found[name] = {p: record[theirs][p] / 1e3 for p in LIMITS}
    assert record["request_count"]["avg"] == NUM_REQUESTS
    return found, cpu_s


if __name__ == "__main__":
    sys.exit(main())
