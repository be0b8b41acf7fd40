"""What one process of the zoo does: a fault until its first failing case, or right kernels in many
seeds.
"""

from __future__ import annotations

import dataclasses
import json

from tests.zoo.runs import find, wrong_verdicts
from tests.zoo.zoo import FAULTS, RIGHT

SEEDS = 20


def run_one(name: str, *, triples: bool) -> int:
    fault = next(fault for fault in FAULTS if fault.name == name)
    print(json.dumps(dataclasses.asdict(find(fault, triples=triples))))
    return 0


def run_right() -> int:
    """1 when a right kernel fails a case in some seed."""
    failed = 0
    for op, kernel in RIGHT:
        wrong, count = wrong_verdicts(op, kernel, num_seeds=SEEDS)
        failed += len(wrong)
        print(
            f"{op} {kernel}: {count} cases pass in {SEEDS} seeds, {len(wrong)} fail",
            *wrong,
            sep="\n  ",
            flush=True,
        )
    return int(failed > 0)
