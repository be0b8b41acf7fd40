"""Seconds until a server answers, and the memory that it takes.

    python -m tests.benchmarks.start MODEL.gguf --rounds 3

Each round starts `enginebay serve` three times: with an empty cache folder; with the C++ kernels
alone, as a wheel brings them; and with everything that the start before it has stored. The machine
should be idle. Flags after `--` are those of `serve`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

from tests.ports import free_port

POLL_S = 0.02
DEADLINE_S = 600.0
CHATS = (
    "What is the capital of France?",
    "Tell me about snails. " * 20,
    "Tell me about cats. " * 60,
    "Say hi.",
    "Write a line about the sea.",
)
COLUMNS = ("caches", "ready s", "first token s", "resident MiB after 5 chats", "at most MiB")


def status_mib(process_id: int, name: str) -> float:
    """Return a figure of /proc/PID/status in MiB."""
    lines = Path(f"/proc/{process_id}/status").read_text(encoding="ascii").splitlines()
    [line] = [line for line in lines if line.startswith(f"{name}:")]
    return int(line.split()[1]) / 1024


def start(model: str, folder: Path, flags: list[str]) -> tuple[float, float, float, float]:
    """Start a server with this cache folder. Returns seconds until it is ready, seconds until the
    first token of a short chat, and the resident memory in MiB after CHATS, and at most.
    """
    port = free_port()
    command = [sys.executable, "-m", "enginebay", "serve", model, "--served-model-name", "m"]
    command += ["--port", str(port), *flags]
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder)}
    began_s = time.perf_counter()
    with (
        subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S) as client,
    ):
        try:
            while time.perf_counter() < began_s + DEADLINE_S and process.poll() is None:
                with contextlib.suppress(httpx.TransportError):
                    if client.get("/readiness").status_code == httpx.codes.OK:
                        break
                time.sleep(POLL_S)
            ready_s = time.perf_counter() - began_s
            for number, text in enumerate(CHATS):
                body = {"model": "m", "messages": [{"role": "user", "content": text}]}
                body |= {"temperature": 0, "max_tokens": 1 if number == 0 else 32}
                client.post("/v1/chat/completions", json=body).raise_for_status()
                if number == 0:
                    first_s = time.perf_counter() - began_s
            found = ready_s, first_s, *(status_mib(process.pid, n) for n in ("VmRSS", "VmHWM"))
        finally:
            process.send_signal(signal.SIGTERM)
    return found


def main() -> int:
    """Print a row for each state of the caches: medians, and the lowest and highest value."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.start", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("flags", nargs="*", help="flags of `enginebay serve`, after --")
    args = parser.parse_args()
    found: dict[str, list[tuple[float, ...]]] = {"none": [], "C++ kernels": [], "all": []}
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            found["none"].append(start(args.model, folder, args.flags))
            found["all"].append(start(args.model, folder, args.flags))
            for one in (folder / "enginebay").iterdir():
                if one.name != "native":
                    shutil.rmtree(one) if one.is_dir() else one.unlink()
            found["C++ kernels"].append(start(args.model, folder, args.flags))
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for title, rows in found.items():
        cells = [
            f"{statistics.median(column):.1f} ({min(column):.1f} to {max(column):.1f})"
            for column in zip(*rows, strict=True)
        ]
        print(f"| {title} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
