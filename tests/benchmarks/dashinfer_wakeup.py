"""Time from a step whose tokens the host has read to the reader of a result queue that has them.

    python -m tests.benchmarks.dashinfer_wakeup --models M --readers 1,8

Each request of the DashInfer API has a thread that waits in Get(). A delay is the time from the
last step that ended before a reader woke to the reader's wake-up; it is shorter than the time
between two steps. The machine should be idle.
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

from enginebay.loop.observer import Ending, Execution, Observer, Update
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
    print("| | readers | wake-ups | median ms | p99 ms | |\n|---|---|---|---|---|---|")
    for size in args.models.split(","):
        checkpoint = str(write_model(args.folder, size, args.dtype))
        engine = started(checkpoint, args.dtype, max(readers))
        for count in readers:
            measure(engine, count)  # warms up
            delays_ms = [one for _ in range(args.rounds) for one in measure(engine, count)]
            median = statistics.median(delays_ms)
            verdict = "met" if median < TARGET_MS else "missed"
            p99 = statistics.quantiles(delays_ms, n=100)[-1]
            print(
                f"| {size} {args.dtype} | {count} | {len(delays_ms)} | {median:.3f} | {p99:.3f} | "
                f"target {TARGET_MS:.0f} ms: {verdict} |",
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


def measure(engine: Engine, count: int) -> list[float]:
    """Run `count` requests with a reader each; returns all delays in milliseconds."""
    loaded = engine._models["model"].loaded
    assert loaded is not None, "the model runs"
    ends, wakes_s = StepEnds(), [list[float]() for _ in range(count)]
    builder = ASGenerationConfigBuilder(seed=1).temperature(0).early_stopping(False)

    def read(results: ResultQueue, wakes: list[float]) -> None:
        while results.Get() is not None:
            wakes.append(time.monotonic())

    loaded.service.audience.add(ends)
    threads = []
    for number, wakes in enumerate(wakes_s):
        ids = [300 + number] * PROMPT_TOKENS
        status, _, results = engine.start_request_ids("model", None, ids, builder)
        assert status is SUCCESS, engine.last_error
        threads.append(threading.Thread(target=read, args=(results, wakes)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    loaded.service.audience.remove(ends)
    times_s = ends.times_s
    woken = [one for wakes in wakes_s for one in wakes]
    return [(one - times_s[bisect.bisect_right(times_s, one) - 1]) * 1e3 for one in woken]


if __name__ == "__main__":
    sys.exit(main())
