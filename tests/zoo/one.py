"""What one process of the zoo does: a fault until its first failing case, or a right kernel in many
seeds.
"""

from __future__ import annotations

import dataclasses
import json

from tests.zoo.runs import check_right, find
from tests.zoo.zoo import FAULTS


def run_one(name: str, *, triples: bool) -> int:
    fault = next(fault for fault in FAULTS if fault.name == name)
    print(json.dumps(dataclasses.asdict(find(fault, triples=triples))))
    return 0


def run_one_right(op: str, kernel: str, *, seeds: int, triples: bool) -> int:
    found = check_right(op, kernel, num_seeds=seeds, triples=triples)
    print(json.dumps(dataclasses.asdict(found)))
    return 0
