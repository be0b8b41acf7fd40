"""CPU time of the HTTP layer: streams over HTTP against the same engine called in process.

    python -m tests.benchmarks.http_cost
    python -m tests.benchmarks.http_cost --profile

The engine is the fake one of the tests, one token per row and step, paced by a sleep: it takes the
same little time both ways. 32 completions stream at a time, with few and with many tokens; rounds
of both ways alternate. The CPU seconds are those of this process (server, loop and engine). The
client over HTTP is `enginebay bench serve`, in a process of its own. The difference between both
ways is the HTTP layer; its slope over tokens is the cost of a token, the rest the cost of a
request.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import dataclasses
import json
import os
import pstats
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, Self

import pytest
import uvicorn

from enginebay import LLM, SamplingParams
from enginebay_bench.serve.arrivals import closed_loop
from enginebay_server.app import create_app
from enginebay_server.served import ServedModel
from enginebay_server.settings import ServerSettings
from tests.benchmarks.http_server import wait_for
from tests.fake_engine import Launched
from tests.fakes import install
from tests.ports import free_port

NUM_STREAMS = 32
FEW, MANY = 4, 132
PROMPT_LEN = 32
LIMITS_US = {"token": 50.0, "request": 500.0}
SIZES: dict[str, Any] = {
    "max_model_len": 512,
    "max_num_seqs": NUM_STREAMS,
    "max_num_batched_tokens": 2048,
}


def main() -> int:
    """Print the costs; 1 when one is above its limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-requests", type=int, default=96)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--profile", action="store_true", help="profile the server's event loop")
    args = parser.parse_args()
    with paced_llm(args.step_ms / 1e3) as llm, Server(llm) as server:
        bench = Bench(llm, server, args.num_requests)
        bench.in_process(MANY)
        bench.over_http(MANY)  # what is made once is made
        if args.profile:
            for num_tokens in (FEW, MANY):
                print(f"{args.num_requests} requests of {num_tokens} tokens")
                with server.profiled():
                    bench.over_http(num_tokens)
            return 0
        costs = [bench.round() for _ in range(args.rounds)]
    print("| cost of the HTTP layer, us of CPU | median | rounds | limit |\n|---|---|---|---|")
    medians = {}
    for name, limit in LIMITS_US.items():
        found = [cost[name] for cost in costs]
        medians[name] = statistics.median(found)
        each = ", ".join(f"{one:.0f}" for one in found)
        print(f"| {name} | {medians[name]:.0f} | {each} | {limit:.0f} |")
    return int(any(medians[name] > limit for name, limit in LIMITS_US.items()))


@contextlib.contextmanager
def paced_llm(step_s: float) -> Iterator[LLM]:
    """An LLM over the fake engine, whose steps take `step_s` without CPU time."""
    read = Launched.read

    def slow_read(launched: Launched) -> object:
        time.sleep(step_s)
        return read(launched)

    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        patch.setattr(Launched, "read", slow_read)
        engine = {"name": "oengine", "num_pages": 1024}
        with LLM("demo", engine=engine, decode_steps=1, generation_config="none", **SIZES) as llm:
            yield llm


class Server:
    """The application on a thread of its own, with the settings of `enginebay serve`."""

    def __init__(self, llm: LLM) -> None:
        model = ServedModel("demo", llm)
        model.warmup = "lazy"
        self.port = free_port()
        app = create_app([model], ServerSettings(warmup="lazy"))
        config = uvicorn.Config(
            app, port=self.port, log_config=None, access_log=False, lifespan="off", ws="none"
        )
        self._server = uvicorn.Server(config)
        self._loop_work = self._server.serve
        self._thread = threading.Thread(target=self._serve)
        self._profile: cProfile.Profile | None = None

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=self._server.config.get_loop_factory()) as runner:
            self._loop = runner.get_loop()
            runner.run(self._loop_work())

    def __enter__(self) -> Self:
        self._thread.start()
        wait_for(f"http://127.0.0.1:{self.port}/v1/models")
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()

    @contextlib.contextmanager
    def profiled(self) -> Iterator[None]:
        """Profile the thread of the event loop, and print its dearest functions."""
        profile = cProfile.Profile()
        self._loop.call_soon_threadsafe(profile.enable)
        yield
        self._loop.call_soon_threadsafe(profile.disable)
        time.sleep(1.0)
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)


@dataclasses.dataclass
class Bench:
    """Both ways to the engine."""

    llm: LLM
    server: Server
    num_requests: int

    def round(self) -> dict[str, float]:
        """Microseconds of the HTTP layer per token and per request."""
        extra = {}
        for num_tokens in (FEW, MANY):
            inside = self.in_process(num_tokens)
            outside = self.over_http(num_tokens)
            extra[num_tokens] = 1e6 * (outside - inside) / self.num_requests
            print(
                f"{self.num_requests} requests of {num_tokens} tokens: {inside:.2f} s of CPU in "
                f"process, {outside:.2f} s over HTTP",
                file=sys.stderr,
            )
        token = (extra[MANY] - extra[FEW]) / (MANY - FEW)
        return {"token": token, "request": extra[FEW] - FEW * token}

    def in_process(self, num_tokens: int) -> float:
        """CPU seconds of this process for all requests, called from an event loop here."""
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)

        async def send(index: int, due_s: float) -> None:
            words = " ".join(["word"] * (PROMPT_LEN - 1))
            async for _ in self.llm.astream(f"{index} {words}", params):
                pass

        start_s = time.process_time()
        asyncio.run(closed_loop(send, self.num_requests, NUM_STREAMS))
        return time.process_time() - start_s

    def over_http(self, num_tokens: int) -> float:
        """The same with clients of another process."""
        command = [sys.executable, "-m", "enginebay", "bench", "serve", "--json", "--ignore-eos"]
        command += ["--url", f"http://127.0.0.1:{self.server.port}", "--warmup", "0"]
        command += ["--endpoint", "completions"]
        command += ["--concurrency", str(NUM_STREAMS), "--num-requests", str(self.num_requests)]
        command += ["--prompt-len", str(PROMPT_LEN), "--new-tokens", str(num_tokens)]
        start_s = time.process_time()
        record = json.loads(asyncio.run(output_of(command)))
        took_s = time.process_time() - start_s
        (load,) = record["loads"]
        assert load["num_answered"] == self.num_requests, load["errors"]
        assert load["num_output_tokens"] == num_tokens * self.num_requests
        print(f"{load['num_chunks']} chunks", file=sys.stderr)
        return took_s


async def output_of(command: list[str]) -> bytes:
    """What a program prints; this process sleeps meanwhile."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, env=environment)
    out, _ = await process.communicate()
    assert process.returncode == 0, "bench serve failed"
    return out


if __name__ == "__main__":
    sys.exit(main())
