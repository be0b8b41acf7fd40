"""Adapters on quantised weights: each row has the log-probabilities of dequantised weights that its
adapter is merged into.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginebay import LLM
from enginebay.compose.composition import make_plan
from enginebay.config import EngineConfig
from enginebay.contracts.adapters import ADAPTER_WEIGHTS
from enginebay.weights import QuantizedArray
from enginebay_runtime.engine import StepEngine
from enginebay_testing.oracle import quantized_weight
from tests.adapters import write_adapter, write_merged
from tests.brief import LEAST, TINY
from tests.gguf_files import convert
from tests.unit.packed_checkpoints import write_quantized
from tests.unit.test_lora_batches import Row, rows_of
from tests.unit.test_stored_quantization import CASES

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_sizes_module")]

SIZES: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "generation_config": "none",
}
NAMES = ["a", None, "b", "a", None, "b"]
PROMPTS = [np.random.default_rng(n).integers(3, 32, n).tolist() for n in (1, 9, 20, 41, 60, 90)]
TOLERANCE = 1e-4

Weights = Mapping[str, np.ndarray]


def loaded(weights: Mapping[str, Any]) -> Weights:
    """The weights of a model by path, dequantised."""
    return {
        path: np.asarray(
            quantized_weight(one) if isinstance(one, QuantizedArray) else one, np.float32
        )
        for path, one in weights.items()
        if not path.startswith(ADAPTER_WEIGHTS)
    }


def plain_weights(folder: str | Path) -> Weights:
    return loaded(make_plan(EngineConfig(model=str(folder), dtype="float32")).load_weights())


def assert_merged(base: str | Path, quantised: str | Path, tmp_path: Path, **fields: Any) -> None:
    """`base`: a plain checkpoint with the layers of `quantised`, which LLM opens with `fields`."""
    adapters = {
        name: write_adapter(tmp_path / name, base, seed=seed, rank=3 + seed, scale=1.0)
        for seed, name in enumerate("ab")
    }
    lora = {name: str(folder) for name, folder in adapters.items()}
    with LLM(str(quantised), **SIZES, **fields, lora=lora) as llm:
        stored = llm.engine.executor.weights()
        assert sum(isinstance(one, QuantizedArray) for one in stored.values()) > 3
        numbers = loaded(stored)
        found = rows_of(llm, PROMPTS, NAMES)
    before, expected = plain_weights(base), dict[str | None, list[Row]]()
    with LLM(str(base), **SIZES, quantization="none") as llm:
        engine = llm.engine
        assert isinstance(engine, StepEngine)
        for name in (None, *adapters):
            merged = numbers
            if name is not None:
                after = plain_weights(write_merged(tmp_path / f"m-{name}", base, adapters[name]))
                merged = {path: one + after[path] - before[path] for path, one in numbers.items()}
            llm.run_on_engine(functools.partial(engine.set_weights, merged))
            expected[name] = rows_of(llm, PROMPTS)
    for i, name in enumerate(NAMES):
        assert found[i][0] == expected[name][i][0]
        np.testing.assert_allclose(found[i][1], expected[name][i][1], atol=TOLERANCE)
        assert name is None or found[i][0] != expected[None][i][0]


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_weights_that_are_quantised_while_they_are_loaded(
    quantization: str, tmp_path: Path
) -> None:
    assert_merged(TINY, TINY, tmp_path, quantization=quantization)


@pytest.mark.parametrize("name", ["gptq", "awq", "w4a16", "w8a16"])
def test_weights_that_a_checkpoint_stores_quantised(name: str, tmp_path: Path) -> None:
    fields, make, numbers, _ = CASES[name]
    quantised, plain = write_quantized(tmp_path, fields, make, numbers, max_position_embeddings=128)
    for folder in (plain, quantised):
        shutil.copy(Path(TINY) / "tokenizer.json", folder)
    assert_merged(plain, quantised, tmp_path)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_weights_of_a_gguf_file(kind: str, tmp_path: Path) -> None:
    assert_merged(LEAST, convert(Path(LEAST), tmp_path / "model.gguf", kind), tmp_path)
