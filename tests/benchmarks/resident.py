"""The resident memory of a server: after five chats, under a load that fills its cache, and later.

    python -m tests.benchmarks.resident MODEL.gguf --wait 600

MODEL is a GGUF file, a folder of a checkpoint, or S, M or L (random weights; `--dtype`), with at
least 4,000 token ids. What the plan of memory says stands beside each figure. Flags after `--` are
those of `serve`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from tests.benchmarks.contest import prompt
from tests.benchmarks.models import SIZES, write_model
from tests.benchmarks.start import running_server, send_chats, status_mib

MIB = 2**20
POLL_S = 0.1
NUM_CLIENTS = 32


def planned(model: str, flags: list[str]) -> dict[str, Any]:
    """What `explain` says of the memory of a server of this model."""
    command = [sys.executable, "-m", "enginebay", "explain", "--model", model, "--json", *flags]
    ran = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def fill(client: httpx.Client, num_tokens: int, length: int, process_id: int) -> float:
    """Send prompts of this length until that many tokens were read. Returns the largest resident
    memory meanwhile, in MiB.
    """
    ended, most = threading.Event(), 0.0

    def watch() -> None:
        nonlocal most
        while not ended.wait(POLL_S):
            most = max(most, status_mib(process_id, "VmRSS"))

    def send(seed: int) -> None:
        body = {"model": "m", "prompt": prompt(seed, length), "max_tokens": 8, "ignore_eos": True}
        client.post("/v1/completions", json=body).raise_for_status()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with concurrent.futures.ThreadPoolExecutor(NUM_CLIENTS) as clients:
            list(clients.map(send, range(-(-num_tokens // length))))
    finally:
        ended.set()
        watcher.join()
    return most


def main() -> int:
    """Print a row for each state of the server."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.resident", description=__doc__
    )
    parser.add_argument("model")
    parser.add_argument("--wait", type=float, default=600.0, help="seconds after the load")
    parser.add_argument("--length", type=int, default=1000, help="tokens of a prompt of the load")
    parser.add_argument("--dtype", default="float32", help="of S, M and L")
    parser.add_argument("--folder", type=Path, default=Path("build/benchmarks"))
    parser.add_argument("flags", nargs="*", help="flags of `enginebay serve`, after --")
    args = parser.parse_args()
    model = args.model
    if model in SIZES:
        model = str(write_model(args.folder, model, args.dtype))
    plan = planned(model, args.flags)
    memory, cache = plan["memory"], plan["cache"]
    rows = []
    with (
        tempfile.TemporaryDirectory() as name,
        running_server(model, Path(name), args.flags) as (process, client, _),
    ):
        send_chats(client)
        rows.append(("after 5 chats", memory["start_bytes"], status_mib(process.pid, "VmRSS")))
        most = fill(client, cache["num_tokens"], args.length, process.pid)
        rows.append(("at most, under the load", memory["max_bytes"], most))
        time.sleep(args.wait)
        later = status_mib(process.pid, "VmRSS")
        rows.append((f"{args.wait:.0f} s after the load", memory["start_bytes"], later))
    print("| state | planned MiB | resident MiB |\n|---|---|---|")
    for state, bytes_, mib in rows:
        print(f"| {state} | {bytes_ / MIB:.0f} | {mib:.0f} |")
    weights, of_cache = memory["weights_bytes"] / MIB, memory["cache_bytes"] / MIB
    print(f"weights {weights:.0f} MiB, cache {of_cache:.0f} MiB ({cache['num_tokens']} tokens)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
