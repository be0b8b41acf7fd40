"""Seconds until a first token, and the memory of a server.

    python -m tests.benchmarks.start MODEL.gguf --rounds 5 --llama-python .venv-llama-cpp/bin/python

MODEL is a GGUF file, a folder of a checkpoint, or S, M or L (random weights; `--dtype`). Each round
starts `enginebay serve`, `enginebay chat` and an LLM with an empty cache folder; with the C++
kernels alone, as a wheel brings them; and with everything that was stored before. Then it starts
the peers, whose environments the flags name, on the same model. The machine should be idle. Flags
after `--` are those of `serve`.
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
from collections.abc import Iterator
from pathlib import Path

import httpx

from tests.benchmarks.models import SIZES, write_model
from tests.ports import free_port

POLL_S = 0.02
DEADLINE_S = 600.0
PROMPT = "What is the capital of France?"
CHATS = (
    PROMPT,
    "Tell me about snails. " * 20,
    "Tell me about cats. " * 60,
    "Say hi.",
    "Write a line about the sea.",
)
SERVE = ("ready s", "first token s", "resident MiB after 5 chats")
CHAT, LLM, AT_MOST = "first token of chat s", "first token of an LLM s", "at most MiB"
COLUMNS = (*SERVE[:2], CHAT, LLM, SERVE[2], AT_MOST)
LLM_PROGRAM = """
import sys
from enginebay import LLM, SamplingParams
with LLM(sys.argv[1]) as llm:
    llm.generate(sys.argv[2], SamplingParams(max_tokens=1))
    print("first token", flush=True)
"""
LLAMA_PROGRAM = """
import os, sys
import llama_cpp
threads = {"n_threads": os.cpu_count(), "n_threads_batch": os.cpu_count()}
llm = llama_cpp.Llama(sys.argv[1], n_ctx=2048, verbose=False, **threads)
llm(sys.argv[2], max_tokens=1)
print("first token", flush=True)
sys.stdin.read()
"""
OPENVINO_PROGRAM = """
import sys
import openvino_genai
pipeline = openvino_genai.LLMPipeline(sys.argv[1], "CPU")
pipeline.generate(sys.argv[2], max_new_tokens=1)
print("first token", flush=True)
sys.stdin.read()
"""
Figures = dict[str, float]


def status_mib(process_id: int, name: str) -> float:
    """Return a figure of /proc/PID/status in MiB."""
    lines = Path(f"/proc/{process_id}/status").read_text(encoding="ascii").splitlines()
    [line] = [line for line in lines if line.startswith(f"{name}:")]
    return int(line.split()[1]) / 1024


@contextlib.contextmanager
def started(command: list[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process with this cache folder, which gets SIGTERM at the end."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)


@contextlib.contextmanager
def running_server(
    model: str, folder: Path, flags: list[str]
) -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client, float]]:
    """A server with this cache folder that is ready, a client of it, and when its start began, in
    seconds of `time.perf_counter`.
    """
    port = free_port()
    command = [sys.executable, "-m", "enginebay", "serve", model, "--served-model-name", "m"]
    command += ["--port", str(port), *flags]
    began_s = time.perf_counter()
    with (
        started(command, folder) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S) as client,
    ):
        while time.perf_counter() < began_s + DEADLINE_S and process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if client.get("/readiness").status_code == httpx.codes.OK:
                    break
            time.sleep(POLL_S)
        yield process, client, began_s


def send_chats(client: httpx.Client) -> float:
    """Send CHATS one after the other. Returns when the first token came: `time.perf_counter`."""
    first_s = 0.0
    for number, text in enumerate(CHATS):
        body = {"model": "m", "prompt": text, "temperature": 0}
        body["max_tokens"] = 1 if number == 0 else 32
        client.post("/v1/completions", json=body).raise_for_status()
        first_s = first_s or time.perf_counter()
    return first_s


def serve(model: str, folder: Path, flags: list[str]) -> Figures:
    """The figures of SERVE, of a server that gets CHATS when it is ready."""
    with running_server(model, folder, flags) as (process, client, began_s):
        found = {SERVE[0]: time.perf_counter() - began_s}
        found[SERVE[1]] = send_chats(client) - began_s
        found[SERVE[2]] = status_mib(process.pid, "VmRSS")
        found[AT_MOST] = status_mib(process.pid, "VmHWM")
    return found


def first_output(command: list[str], folder: Path, name: str, *, memory: bool = False) -> Figures:
    """Seconds from the creation of a process to the first byte that it prints, as `name`; and with
    `memory` its resident memory then.
    """
    began_s = time.perf_counter()
    with started(command, folder) as process:
        assert process.stdout is not None
        if not process.stdout.read(1):
            sys.exit(f"{' '.join(command[:4])} ... ended without a token")
        found = {name: time.perf_counter() - began_s}
        if memory:
            found[SERVE[2]] = status_mib(process.pid, "VmRSS")
            found[AT_MOST] = status_mib(process.pid, "VmHWM")
    return found


def start(model: str, folder: Path, flags: list[str], *, chats: bool) -> Iterator[Figures]:
    """Yield the figures of a server, of a chat where the model has a chat template, and of an LLM.
    Each starts with this folder of caches, which the caller may change between them.
    """
    yield serve(model, folder, flags)
    if chats:
        chat = [sys.executable, "-m", "enginebay", "chat", "--model", model, PROMPT]
        yield first_output([*chat, "--max-tokens", "1"], folder, CHAT)
    yield first_output([sys.executable, "-c", LLM_PROGRAM, model, PROMPT], folder, LLM)


def keep_only_native(folder: Path) -> None:
    """Leave the C++ kernels in a cache folder, as a wheel brings them, and nothing else."""
    for one in (folder / "enginebay").iterdir():
        if one.name != "native":
            shutil.rmtree(one) if one.is_dir() else one.unlink()


def main() -> int:
    """Print a row for each state of the caches: medians, and the lowest and highest value."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.start", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32", help="of S, M and L")
    parser.add_argument("--folder", type=Path, default=Path("build/benchmarks"))
    parser.add_argument("--llama-python", help="a Python with llama-cpp-python")
    parser.add_argument("--openvino-python", help="a Python with openvino-genai")
    parser.add_argument("--openvino-model", help="the model in OpenVINO's form; the same without")
    parser.add_argument("flags", nargs="*", help="flags of `enginebay serve`, after --")
    args = parser.parse_args()
    model = args.model
    if model in SIZES:
        model = str(write_model(args.folder, model, args.dtype))
    peers = {
        "llama.cpp": [args.llama_python, "-c", LLAMA_PROGRAM, model, PROMPT],
        "OpenVINO GenAI": [
            args.openvino_python,
            "-c",
            OPENVINO_PROGRAM,
            args.openvino_model or model,
            PROMPT,
        ],
    }
    found: dict[str, list[Figures]] = {}
    for _ in range(args.rounds):
        for title, figures in _round(model, args.flags, chats=args.model not in SIZES):
            found.setdefault(title, []).append(figures)
        for title, command in peers.items():
            if command[0]:
                with tempfile.TemporaryDirectory() as name:
                    figures = first_output(command, Path(name), LLM, memory=True)
                found.setdefault(title, []).append(figures)
    report(found)
    return 0


def _round(model: str, flags: list[str], *, chats: bool) -> Iterator[tuple[str, Figures]]:
    """The figures of one round, with what was stored before."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for figures in start(model, folder, flags, chats=chats):
            yield "nothing", figures
            native = folder.with_suffix(".native")
            if not native.exists():
                shutil.copytree(folder, native)
                keep_only_native(native)
            keep = folder.with_suffix(".all")
            shutil.copytree(folder, keep, dirs_exist_ok=True)
            shutil.rmtree(folder / "enginebay")
        wheel, everything = folder.with_suffix(".native"), folder.with_suffix(".all")
        try:
            for figures in start(model, wheel, flags, chats=chats):
                yield "C++ kernels", figures
                keep_only_native(wheel)
            for figures in start(model, everything, flags, chats=chats):
                yield "C++ kernels and programs", figures
        finally:
            shutil.rmtree(wheel)
            shutil.rmtree(everything)


def report(found: dict[str, list[Figures]]) -> None:
    """Print the table."""
    print(f"| stored before | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 1)}")
    for title, rows in found.items():
        cells = []
        for column in COLUMNS:
            values = [figures[column] for figures in rows if column in figures]
            median = f"{statistics.median(values):.1f}" if values else ""
            cells.append(median and f"{median} ({min(values):.1f} to {max(values):.1f})")
        print(f"| {title} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
