"""Speed over HTTP against the same engine called in process: throughput, and time to first token.

    python -m tests.benchmarks.http_speed
    python -m tests.benchmarks.http_speed --core 0

The engine runs the random model S (f32). Both ways stream. A round runs 32 streams both ways and
then single requests both ways, in turn and in alternating order. The client over HTTP is a process
of its own and reads without parsing, but shares the machine's cores with the engine. Printed are
medians of the ratios and differences of the pairs, and the interval that holds the true median with
a probability of at least 95 %.

With `--core 0` engine and server share that core, the client takes another, and the throughput is
tokens per CPU second of engine and server: for a machine that does other work meanwhile. It is the
throughput of a server whose cores are all busy.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from enginebay import LLM, SamplingParams
from enginebay_bench.serve.arrivals import closed_loop
from tests.benchmarks.http_cost import Server
from tests.benchmarks.models import write_model
from tests.benchmarks.trees import interval

NUM_STREAMS, NEW_TOKENS, PROMPT_LEN, FIRST_PROMPT_LEN = 32, 128, 32, 64
LIMITS = {"throughput": 0.95, "first": 3.0}
SIZES: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": NUM_STREAMS}


def main() -> int:
    """Print the table; 1 when a median is beyond its limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--num-requests", type=int, default=32, help="requests of a load")
    parser.add_argument("--num-first", type=int, default=8, help="single requests of a round")
    parser.add_argument("--core", type=int, help="run there, and compare CPU seconds")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "enginebay")
    args = parser.parse_args()
    path = write_model(args.folder, "S", "float32")
    others = os.sched_getaffinity(0) - {args.core}
    if args.core is not None:
        os.sched_setaffinity(0, {args.core})
    sizes = {**SIZES, "compile_cache": str(args.folder / "jax")}
    with (
        LLM(str(path), dtype="float32", generation_config="none", **sizes) as llm,
        Server(llm) as server,
        client_of(server.port, others) as client,
        asyncio.Runner() as runner,
    ):
        print(f"{llm.warmup()} programs", file=sys.stderr)
        clock = time.perf_counter if args.core is None else time.process_time
        bench = Bench(llm, client, args.num_requests, args.num_first, clock, runner)
        bench.loads(is_reversed=False)
        bench.firsts()
        loads, firsts = [], []
        for number in range(args.rounds):
            loads.append(bench.loads(is_reversed=number % 2 == 1))
            firsts += bench.firsts()
    print("| figure | in process | over HTTP | median (95 % interval) | limit |")
    print("|---|---|---|---|---|")
    tokens = args.num_requests * NEW_TOKENS
    inside, outside = ([tokens / seconds for seconds in way] for way in zip(*loads, strict=True))
    ratios = sorted(http / own for own, http in zip(inside, outside, strict=True))
    names = [f"{statistics.median(rate):.0f}" for rate in (inside, outside)]
    what = f"tokens per {'' if args.core is None else 'CPU '}second, {NUM_STREAMS} streams"
    row(what, names, ratios, "", f"{LIMITS['throughput']} or more")
    more = sorted(1e3 * (http - own) for own, http in firsts)
    names = [f"{1e3 * statistics.median(way):.2f} ms" for way in zip(*firsts, strict=True)]
    row("first token of one request", names, more, " ms", f"{LIMITS['first']:g} ms")
    is_right = statistics.median(ratios) >= LIMITS["throughput"]
    return int(not (is_right and statistics.median(more) <= LIMITS["first"]))


def row(name: str, medians: list[str], values: list[float], unit: str, limit: str) -> None:
    """Print a line of the table. The values are ascending."""
    inside, outside = medians
    low, high = interval(values)
    middle = f"{statistics.median(values):.3f}{unit} ({low:.3f} to {high:.3f})"
    print(f"| {name} | {inside} | {outside} | {middle} | {limit} |")


@contextmanager
def client_of(port: int, cores: Collection[int]) -> Iterator[subprocess.Popen[str]]:
    """A client in a process of its own, on these cores."""
    command = ["taskset", "-c", ",".join(map(str, cores))]
    command += [sys.executable, "-m", "tests.benchmarks.http_client", str(port)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()


@dataclasses.dataclass
class Bench:
    """Both ways to the engine. No two prompts are equal."""

    llm: LLM
    client: subprocess.Popen[str]
    num_requests: int
    num_first: int
    clock: Callable[[], float]
    """Seconds for the loads: wall time, or the CPU time of this process."""
    runner: asyncio.Runner
    """The event loop for calls in process."""
    num_prompts: int = 0

    def prompts(self, num: int, length: int) -> list[str]:
        """New prompts of `length` tokens, which share no prefix."""
        self.num_prompts += num
        start = self.num_prompts
        return [
            " ".join(
                f"w{3 + (7 * (start + i) + 131 * j * (start + i + 1)) % 4000}"
                for j in range(length)
            )
            for i in range(num)
        ]

    def loads(self, *, is_reversed: bool) -> tuple[float, float]:
        """The seconds of a load in process and over HTTP."""
        ways = [self.load_in_process, self.load_over_http]
        took_s = [self._timed(way) for way in (reversed(ways) if is_reversed else ways)]
        inside, outside = reversed(took_s) if is_reversed else took_s
        print(f"load: {inside:.2f} s in process, {outside:.2f} s over HTTP", file=sys.stderr)
        return inside, outside

    def _timed(self, way: Callable[[], None]) -> float:
        start_s = self.clock()
        way()
        return self.clock() - start_s

    def firsts(self) -> list[tuple[float, float]]:
        """Seconds to the first token of single requests, in process and over HTTP in turn and in
        alternating order.
        """
        found = []
        for number in range(self.num_first):
            if number % 2 == 0:
                inside = self.first_in_process()
                found.append((inside, self.first_over_http()))
            else:
                outside = self.first_over_http()
                found.append((self.first_in_process(), outside))
        return found

    def load_in_process(self) -> None:
        """Read all streams of a load."""
        params, prompts = sampling(NEW_TOKENS), self.prompts(self.num_requests, PROMPT_LEN)

        async def send(index: int, due_s: float) -> None:
            async for _ in self.llm.astream(prompts[index], params):
                pass

        self.runner.run(closed_loop(send, self.num_requests, NUM_STREAMS))

    def load_over_http(self) -> None:
        """The same by the client."""
        prompts = self.prompts(self.num_requests, PROMPT_LEN)
        self._ask(load=prompts, max_tokens=NEW_TOKENS, streams=NUM_STREAMS)

    def first_in_process(self) -> float:
        [prompt] = self.prompts(1, FIRST_PROMPT_LEN)

        async def first() -> float:
            stream = self.llm.astream(prompt, sampling(4))
            start_s = time.perf_counter()
            took_s = [time.perf_counter() - start_s async for _ in stream]
            return took_s[0]

        return self.runner.run(first())

    def first_over_http(self) -> float:
        return self._ask(first=self.prompts(1, FIRST_PROMPT_LEN), max_tokens=4)

    def _ask(self, **command: Any) -> float:
        assert self.client.stdin is not None
        assert self.client.stdout is not None
        self.client.stdin.write(json.dumps(command) + "\n")
        self.client.stdin.flush()
        took_s: float = json.loads(self.client.stdout.readline())[0]
        return took_s


def sampling(max_tokens: int) -> SamplingParams:
    """Greedy, and of exactly max_tokens tokens."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


if __name__ == "__main__":
    sys.exit(main())
