"""What a service costs that has nothing to do: CPU time of the whole process, as a share of one
core.

    python -m tests.benchmarks.idle --seconds 10

Each API serves a request first, so that all its threads run, and is then left alone.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable

from enginebay import LLM, SamplingParams
from enginebay_esurge import eSurge

TARGET = 0.01
SETTLE_S = 0.5
FEW_TOKENS = SamplingParams(max_tokens=8, ignore_eos=True)


def main() -> int:
    """Print a row for each API; 1 when one of them costs more than the target."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.idle", description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--engines", default="vinference,oengine", help="of LLM")
    args = parser.parse_args()
    print(f"| idle for {args.seconds:.0f} s | threads | share of a core |\n|---|---|---|")
    shares = []
    for engine in args.engines.split(","):
        with LLM(
            args.model, engine=engine, max_model_len=256, max_num_seqs=4, generation_config="none"
        ) as llm:
            llm.generate("Once upon a time", FEW_TOKENS)
            shares.append(_tell(f"LLM, {engine}", args.seconds))
    service = eSurge(
        args.model,
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        use_aot_forward=False,
        generation_config="none",
    )
    service.initiate()
    try:
        service.generate("Once upon a time", FEW_TOKENS)
        shares.append(_tell("eSurge", args.seconds))
        service.start_monitoring(prometheus_port=0, start_grafana=False)
        shares.append(_tell("eSurge, monitored", args.seconds, service.stop_monitoring))
    finally:
        service.terminate()
    return int(max(shares) > TARGET)


def _tell(name: str, seconds: float, afterwards: Callable[[], object] | None = None) -> float:
    """Measure and print one row."""
    time.sleep(SETTLE_S)
    cpu, start = time.process_time(), time.perf_counter()
    time.sleep(seconds)
    share = (time.process_time() - cpu) / (time.perf_counter() - start)
    verdict = "met" if share <= TARGET else "missed"
    print(
        f"| {name} | {threading.active_count()} | {share:.3%} (target {TARGET:.0%}: {verdict}) |",
        flush=True,
    )
    if afterwards is not None:
        afterwards()
    return share


if __name__ == "__main__":
    sys.exit(main())
