"""Loading a checkpoint takes little more memory than its weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.checkpoints import model_of, write

# The high-water mark of /proc, not ru_maxrss: that one begins with what the parent process had.
MEASURE = """
import json, sys
from pathlib import Path
import jax
from enginebay.weights import WeightFormat
from enginebay_models.llama import family
from enginebay_models.source import CheckpointSource

def resident(field):
    return int(Path("/proc/self/status").read_text().split(field + ":")[1].split()[0]) * 1024

jax.device_put(1).block_until_ready()
source = CheckpointSource(sys.argv[1])
model = family.build(source.config, dtype=sys.argv[2])
before = resident("VmRSS")
weights = source.load_weights(model, form=WeightFormat(sys.argv[2]), place=lambda path, spec: None)
print(json.dumps([sum(w.nbytes for w in weights.values()), resident("VmHWM") - before]))
"""


@pytest.mark.long
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="resident memory is read from /proc"
)
@pytest.mark.parametrize(("stored", "dtype"), [(np.float32, "float32"), (np.float32, "bfloat16")])
def test_peak_memory_is_that_of_the_weights(tmp_path: Path, stored: Any, dtype: str) -> None:
    scale = 1 if dtype == "float32" else 2  # the weights as loaded are about 220 MB
    fields = {
        "vocab_size": 48000 * scale,
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 2 * scale,
    }
    tensors = {
        name: np.zeros(shape, stored)
        for source in model_of(**fields).tensor_sources().values()
        for name, shape in zip(source.names, source.shapes, strict=True)
    }
    folder = write(tmp_path / "model", tensors, **fields)
    del tensors
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(folder), dtype],
        check=True,
        capture_output=True,
        text=True,
    )
    num_bytes, peak = json.loads(done.stdout)
    assert num_bytes > 200e6
    assert peak <= 1.25 * num_bytes, f"{peak / 1e6:.0f} MB for {num_bytes / 1e6:.0f} MB of weights"
