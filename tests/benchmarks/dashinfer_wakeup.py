"""How soon a reader of a result queue has a token.

    python -m tests.benchmarks.dashinfer_wakeup --models M --readers 1,8

Each request of the DashInfer API has a thread that waits in Get(). Two delays end when the reader
is awake: one begins when the token is put into the queue, the other when the host has read the step
that made the token. Both are shorter than a step. The machine should be idle.
"""

from __future__ import annotations

import argparse
import bisect
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

from enginebay.serving.events import Event
from enginebay.serving.observer import Ending, Execution, Observer, Update
from enginebay_dashinfer.allspark import (
    ASGenerationConfigBuilder,
    AsStatus,
    Engine,
    HuggingFaceModel,
    ResultQueue,
    TargetDevice,
)
from tests.benchmarks.models import write_model

SUCCESS = AsStatus.ALLSPARK_SUCCESS
PROMPT_TOKENS, NEW_TOKENS = 32, 128
TARGET_MS = 1.0
HEADER = (
    "| | readers | wake-ups | ms after the queue has it, median and p99 | ms after the step was "
    "read, median and p99 | |\n|---|---|---|---|---|---|"
)


class StepEnds(Observer):
    """Keeps the times at which steps were read, in seconds of the monotonic clock."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def updated(self, update: Update) -> None:
        """Do nothing."""

    def executed(self, execution: Execution) -> None:
        """Keep the time of a step."""
        self.times_s.append(execution.at_s)

    def ended(self, ending: Ending) -> None:
        """Do nothing."""


def main() -> int:
    """Print a row for each model and number of readers."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.dashinfer_wakeup", description=__doc__
    )
    parser.add_argument("--models", default="M", help="sizes of tests.benchmarks.models")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--readers", default="1,8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(".cache/benchmarks"))
    args = parser.parse_args()
    readers = [int(one) for one in args.readers.split(",")]
    print(HEADER)
    for size in args.models.split(","):
        checkpoint = str(write_model(args.folder, size, args.dtype))
        engine = started(checkpoint, args.dtype, max(readers))
        for count in readers:
            measure(engine, count)  # warms up
            rounds = [measure(engine, count) for _ in range(args.rounds)]
            of_queue = [one for delays in rounds for one in delays[0]]
            of_step = [one for delays in rounds for one in delays[1]]
            verdict = "met" if statistics.median(of_queue) < TARGET_MS else "missed"
            print(
                f"| {size} {args.dtype} | {count} | {len(of_queue)} | {spread(of_queue)} | "
                f"{spread(of_step)} | target {TARGET_MS:.0f} ms: {verdict} |",
                flush=True,
            )
        engine.close()
    return 0


def started(checkpoint: str, dtype: str, max_batch: int) -> Engine:
    """Return an engine with the running model "model"."""
    engine = Engine()
    with tempfile.TemporaryDirectory() as folder:
        loader = HuggingFaceModel(checkpoint, "model", user_set_data_type=dtype).load_model()
        loader.serialize_to_path(engine, folder)
        builder = loader.create_reference_runtime_config_builder(
            "model", TargetDevice.CPU, [0], max_batch, PROMPT_TOKENS + NEW_TOKENS
        )
        for status in (
            engine.install_model(builder.lora_max_num(0).build()),
            engine.start_model("model"),
        ):
            assert status is SUCCESS, engine.last_error
    return engine


def spread(delays_ms: list[float]) -> str:
    """Return the median and the 99th percentile."""
    p99 = statistics.quantiles(delays_ms, n=100)[-1]
    return f"{statistics.median(delays_ms):.3f}, {p99:.3f}"


def measure(engine: Engine, count: int) -> tuple[list[float], list[float]]:
    """Run `count` requests with a reader each; returns the milliseconds of all wake-ups after the
    queue had the token, and after the step was read.
    """
    loaded = engine._models["model"].loaded
    assert loaded is not None, "the model runs"
    ends, wakes_s = StepEnds(), [list[float]() for _ in range(count)]
    puts_s = [list[float]() for _ in range(count)]
    builder = ASGenerationConfigBuilder(seed=1).temperature(0).early_stopping(False)

    def watch(results: ResultQueue, puts: list[float]) -> None:
        put = results.put

        def timed(event: Event) -> None:
            puts.append(time.monotonic())
            put(event)

        results.put = timed

    def read(results: ResultQueue, wakes: list[float]) -> None:
        while results.Get() is not None:
            wakes.append(time.monotonic())

    loaded.service.audience.add(ends)
    threads = []
    for number in range(count):
        ids = [300 + number] * PROMPT_TOKENS
        status, _, results = engine.start_request_ids("model", None, ids, builder)
        assert status is SUCCESS, engine.last_error
        watch(results, puts_s[number])
        threads.append(threading.Thread(target=read, args=(results, wakes_s[number])))
        threads[-1].start()
    for thread in threads:
        thread.join()
    loaded.service.audience.remove(ends)
    of_queue = [
        since(puts, one) for puts, wakes in zip(puts_s, wakes_s, strict=True) for one in wakes
    ]
    return of_queue, [since(ends.times_s, one) for wakes in wakes_s for one in wakes]


def since(times_s: list[float], now_s: float) -> float:
    """Return the milliseconds from the last of the times before `now_s`."""
    return (now_s - times_s[bisect.bisect_right(times_s, now_s) - 1]) * 1e3


if __name__ == "__main__":
    sys.exit(main())
