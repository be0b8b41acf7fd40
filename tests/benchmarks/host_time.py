"""What the host does for one decode step, with the device's work taken out.

    python -m tests.benchmarks.host_time --engines vinference,oengine --schedulers fcfs,fair

A whole turn of the engine loop is timed: the scheduler's view and decision, cache reserved, the
plan and its arrays, the launch, and of the step before it the tokens read, recorded and told. The
engine, its shapes and its way of launching are the real ones; each compiled program is replaced by
one that takes the same arguments, gives its donated state back and the same token for every row. So
a launch costs what passing weights, cache and rows to XLA costs, which grows with the number of
arrays (a column of its own), and the model costs nothing. Detokenising is the reader's and is not
in it.

CPU time is the loop thread's own, which other processes hardly change; wall time is what a step is
longer by.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import dataclasses
import functools
import pstats
import queue
import statistics
import sys
import time
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay import LLM
from enginebay.contracts.step_key import StepKey
from enginebay.serving.running import Running
from enginebay.types import SamplingParams
from enginebay_runtime.local import LocalExecutor
from enginebay_runtime.logprobs import Logprobs
from enginebay_runtime.programs import program_name
from enginebay_runtime.step import Sampled, StepState
from enginebay_testing.driver import request_of

PROMPT_TOKENS = 16
TOKEN = 7
WARM_TURNS = 6
TARGET_ROWS, TARGET_S, TARGET_S_PER_ROW = 32, 1e-3, 15e-6


class InstantPrograms:
    """Stands in for a runner's compiled programs, and adds up the time of their launches."""

    def __init__(self, runner: LocalExecutor) -> None:
        self._runner = runner
        self._compile = runner._compiled
        self._programs: dict[Hashable, Any] = {}
        self.launch_s = 0.0

    def __call__(self, key: StepKey) -> Callable[..., Any]:
        """What the executor calls for the program of a step."""
        if key.kind == "history":
            return self._compile(key)
        name = program_name(key, self._runner.layouts)
        if name not in self._programs:
            width = 1 if key.kind == "prefill" else self._runner.max_steps
            step = functools.partial(_pass_through, key, width, self._runner.info.vocab_size)
            self._programs[name] = jax.jit(step, donate_argnums=1, keep_unused=True)
            self._runner._programs[name] = None  # compiled, for whoever chooses a program
        return functools.partial(self._launch, name)

    def _launch(self, name: Hashable, *args: Any) -> Any:
        program = self._programs[name]
        if isinstance(program, jax.stages.Wrapped):
            program = self._programs[name] = program.lower(*args).compile()
        start = time.perf_counter()
        launched = program(*args)
        self.launch_s += time.perf_counter() - start
        return launched


def _pass_through(
    key: StepKey, width: int, vocab_size: int, weights: Any, state: StepState, _: Any, inputs: Any
) -> tuple[StepState, Sampled]:
    """The state as it came, and TOKEN for every row: as many as a decode asks for, one of a
    prefill.
    """
    shape = (key.bucket.seqs, width)
    num_steps = 1 if key.kind == "prefill" else inputs.num_steps
    tokens = jnp.where(jnp.arange(width) < num_steps, jnp.full(shape, TOKEN, jnp.int32), -1)
    return state, Sampled(tokens, Logprobs.empty(shape, vocab_size))


@dataclasses.dataclass(frozen=True)
class HostTime:
    """Medians over decode turns, in seconds."""

    wall_s: float
    cpu_s: float
    launch_s: float


class Host:
    """An LLM whose loop is driven by hand, on its own thread."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.loop = llm._loop
        runner = llm.engine.executor
        self.programs = InstantPrograms(runner)
        runner._compiled = self.programs
        self.num_arrays = len(jax.tree.leaves((runner.model_weights, runner.state)))

    def measure(
        self, num_rows: int, num_turns: int, profile: cProfile.Profile | None = None
    ) -> HostTime:
        """So many turns, each of which decodes all of `num_rows` rows."""
        config = self.llm.config
        assert config.max_model_len is not None, "an LLM has settled it"
        room = config.max_model_len - PROMPT_TOKENS
        num_turns = min(num_turns, room // config.decode_steps - WARM_TURNS - 2)
        rng = np.random.default_rng(0)
        requests = [
            request_of(
                rng.integers(3, self.llm.plan.model.info.vocab_size, PROMPT_TOKENS).tolist(),
                SamplingParams(max_tokens=room, ignore_eos=True),
                f"row {number}",
            )
            for number in range(num_rows)
        ]
        tickets = self.loop.submit(requests)
        times: HostTime = self.loop.call(lambda: self._turns(tickets, num_turns, profile))
        return times

    def _turns(
        self, tickets: list[Running], num_turns: int, profile: cProfile.Profile | None
    ) -> HostTime:
        table = self.loop._requests
        while table.waiting or any(
            one.num_computed < one.num_prefill for one in table.running.values()
        ):
            self.loop._turn()
        for _ in range(WARM_TURNS):
            self.loop._turn()
        assert len(table.running) == len(tickets), "every request is running"
        walls, cpus, launches = [], [], []
        for _ in range(num_turns):
            for ticket in tickets:
                _drain(ticket)
            if profile is not None:
                profile.enable()
            self.programs.launch_s = 0.0
            wall, cpu = time.perf_counter(), time.thread_time()
            self.loop._turn()
            cpus.append(time.thread_time() - cpu)
            walls.append(time.perf_counter() - wall)
            launches.append(self.programs.launch_s)
            if profile is not None:
                profile.disable()
        assert min(launches) > 0, "every turn launches a step"
        self.loop._steps.commit_all()
        for one in table.everything:
            self.loop._steps.end(one, "abort")
        return HostTime(*map(statistics.median, (walls, cpus, launches)))


def _drain(ticket: Running) -> None:
    """Read what has come, as a request's reader does on a thread of its own."""
    with contextlib.suppress(queue.Empty):
        while True:
            ticket.get_nowait()


def main() -> int:
    """Print a table for each engine, scheduler and number of decode steps."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.host_time", description=__doc__
    )
    parser.add_argument(
        "--model", default="demo", help="demo, or a folder: its arrays are passed, not used"
    )
    parser.add_argument("--engines", default="vinference,oengine")
    parser.add_argument("--schedulers", default="fcfs,fair")
    parser.add_argument("--rows", default="1,8,32,64,128,256")
    parser.add_argument("--decode-steps", default="1,16")
    parser.add_argument(
        "--turns",
        type=int,
        default=200,
        help="decode steps that are timed, fewer with a short context",
    )
    parser.add_argument(
        "--profile", type=int, default=0, help="print the costliest N functions at the most rows"
    )
    args = parser.parse_args()
    rows = [int(n) for n in args.rows.split(",")]
    for engine in args.engines.split(","):
        for scheduler in args.schedulers.split(","):
            for steps in map(int, args.decode_steps.split(",")):
                with LLM(
                    args.model, engine=engine, scheduler=scheduler, decode_steps=steps,
                    max_num_seqs=max(rows), max_model_len=1024, generation_config="none",
                ) as llm:  # fmt: skip
                    host = Host(llm)
                    print(
                        f"\n## {engine}, {scheduler}, decode_steps = {steps}, "
                        f"{host.num_arrays} arrays\n"
                    )
                    _print({n: host.measure(n, args.turns) for n in rows})
                    if args.profile:
                        _profile(host, max(rows), args)
    return 0


def _print(times: dict[int, HostTime]) -> None:
    print("| rows | cpu us | wall us | of that the launch |\n|---|---|---|---|")
    for num_rows, one in times.items():
        print(
            f"| {num_rows} | {one.cpu_s * 1e6:.0f} | {one.wall_s * 1e6:.0f} | "
            f"{one.launch_s * 1e6:.0f} |"
        )
    most = max(times)
    if TARGET_ROWS in times and most > TARGET_ROWS:
        base = times[TARGET_ROWS].cpu_s
        slope = (times[most].cpu_s - base) / (most - TARGET_ROWS)
        met = base < TARGET_S and slope < TARGET_S_PER_ROW
        print(
            f"\n{base * 1e6:.0f} us at {TARGET_ROWS} rows (target {TARGET_S * 1e6:.0f}), and "
            f"{slope * 1e6:.1f} us a row more up to {most} (target {TARGET_S_PER_ROW * 1e6:.0f}): "
            f"{'met' if met else 'missed'}",
            flush=True,
        )


def _profile(host: Host, num_rows: int, args: argparse.Namespace) -> None:
    profile = cProfile.Profile()
    host.measure(num_rows, args.turns, profile)
    pstats.Stats(profile, stream=sys.stdout).sort_stats("tottime").print_stats(args.profile)


if __name__ == "__main__":
    sys.exit(main())
