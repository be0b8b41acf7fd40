"""A comparison of an engine that has a cheat as its norm with a program that answers at once."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from enginebay.config import EngineConfig
from enginebay_bench.compare.records import Cell
from enginebay_bench.compare.session import compare
from enginebay_bench.compare.variants import ComparedVariant, engine_variant

FAKE = Path(__file__).parents[2] / "unit" / "fake_peer.py"


def main(path: str) -> int:
    reference = ComparedVariant("reference", (sys.executable, str(FAKE)))
    kernels = {"kernels": {"rms_norm": path}, "platform": "cpu"}
    mine = engine_variant("mine", EngineConfig.model_validate(kernels))
    cell = Cell(1, 16, 8)
    found = compare([reference, mine], [cell], rounds=1)
    (row,) = [row for row in found.rows if row.variant == "mine"]
    print(json.dumps({"verdict": row.parity.verdict, "text": row.parity.text}))
    return int(not found.is_right and row not in found.ranking(cell))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
