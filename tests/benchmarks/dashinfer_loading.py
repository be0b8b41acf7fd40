"""Time to load a serialised model of the DashInfer API, against the checkpoint that it was made of.

    python -m tests.benchmarks.dashinfer_loading --models M --dtypes float32,bfloat16

Both are opened and their weights are put on the device; they take turns, with their files in the
page cache of the system. Then all weights are compared bit by bit. The machine should be idle.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from enginebay.compose.composition import make_plan, open_checkpoint
from enginebay.compose.plan import Plan
from enginebay.config import make_config
from enginebay.contracts.model import Checkpoint
from enginebay.plugins.registry import load_registry
from enginebay.weights import Weight
from enginebay_dashinfer.allspark import HuggingFaceModel, TargetDevice
from enginebay_dashinfer.planning import plan_model
from enginebay_dashinfer.stored_model import StoredModel
from tests.benchmarks.models import write_model

MAX_LENGTH = 1024
HEADER = (
    "| | checkpoint ms | serialised ms | times faster | MiB | weights |\n|---|---|---|---|---|---|"
)


@dataclasses.dataclass(frozen=True)
class Contestant:
    """A plan of a model, and a function that opens the model's files."""

    name: str
    plan: Plan
    opens: Callable[[], Checkpoint]

    def load(self) -> dict[str, Weight]:
        """Open the files, and put the weights on the device."""
        return jax.block_until_ready(self.plan.load_weights(self.opens()))


def main() -> int:
    """Print a row for each model, dtype and quantisation."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.dashinfer_loading", description=__doc__
    )
    parser.add_argument("--models", default="M", help="sizes of tests.benchmarks.models")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--quantizations", default="none,int8")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", type=Path, default=Path(".cache/benchmarks"))
    args = parser.parse_args()
    print(HEADER)
    for size in args.models.split(","):
        for dtype in args.dtypes.split(","):
            checkpoint = str(write_model(args.folder, size, dtype))
            for quantization in args.quantizations.split(","):
                title = f"{size} {dtype}" + ("" if quantization == "none" else f", {quantization}")
                with tempfile.TemporaryDirectory() as folder:
                    pair = prepared(checkpoint, dtype, quantization, folder)
                    print(f"| {title} | {compared(*pair, args.rounds)}", flush=True)
    return 0


def prepared(
    checkpoint: str, dtype: str, quantization: str, folder: str
) -> tuple[Contestant, Contestant]:
    """Serialise a checkpoint into a folder; returns the checkpoint and the serialised model."""
    quantized = quantization != "none"
    loader = HuggingFaceModel(checkpoint, "model", user_set_data_type=dtype).load_model()
    loader.serialize_to_path(None, folder, quantized, quantized)
    builder = loader.create_reference_runtime_config_builder(
        "model", TargetDevice.CPU, [0], 8, MAX_LENGTH
    )
    serialised = plan_model(builder.lora_max_num(0).build())
    registry = load_registry()
    config = make_config(
        {
            "model": checkpoint,
            "dtype": dtype,
            "quantization": quantization,
            "engine": "esurge",
            "max_model_len": MAX_LENGTH,
            "max_num_seqs": 8,
        }
    )
    files = loader.files()
    return (
        Contestant(
            "checkpoint",
            make_plan(config),
            lambda: open_checkpoint(registry, config, checkpoint),
        ),
        Contestant("serialised", serialised, lambda: StoredModel(*files)),
    )


def compared(old: Contestant, new: Contestant, rounds: int) -> str:
    """Return the cells of a row: median milliseconds of both, and how the weights compare."""
    times: dict[str, list[float]] = {old.name: [], new.name: []}
    leaves: dict[str, list[jax.Array]] = {}
    for number in range(rounds + 2):  # two to read the files and to compile
        for one in (old, new):
            began_s = time.perf_counter()
            weights = one.load()
            if number > 1:
                times[one.name].append(time.perf_counter() - began_s)
            leaves[one.name] = jax.tree.leaves(weights)
            del weights
    equal = all(
        np.array_equal(np.asarray(one), np.asarray(other))
        for one, other in zip(*leaves.values(), strict=True)
    )
    size = sum(one.nbytes for one in leaves[new.name])
    slow, fast = (statistics.median(seconds) for seconds in times.values())
    return (
        f"{slow * 1e3:.1f} | {fast * 1e3:.1f} | {slow / fast:.2f} | {size / 2**20:.0f} | "
        f"{'equal' if equal else 'DIFFERENT'} |"
    )


if __name__ == "__main__":
    sys.exit(main())
