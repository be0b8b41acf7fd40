"""What quantised weights do to the demo model: its perplexity on held-out text, and its memory."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from enginebay import EngineConfig
from enginebay.compose.composition import make_plan
from enginebay.compose.plan import Plan
from enginebay.weights import QuantizedArray
from enginebay_testing.oracle import quantized_weight
from enginebay_testing.reference import ReferenceModel

pytestmark = pytest.mark.slow
NUM_TEXTS, TOKENS = 60, 256


def plan_of(**choices: Any) -> Plan:
    fixed: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "engine": "vinference"}
    return make_plan(EngineConfig(**(fixed | {"kernels": {"linear": "xla"}} | choices)))


def perplexity(model: ReferenceModel, texts: list[list[int]]) -> float:
    """Of every token but the first of each text."""
    total, count = 0.0, 0
    for ids in texts:
        logits = model.logits(ids).astype(np.float64)[:-1]
        logprobs = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
        total -= logprobs[np.arange(len(ids) - 1), ids[1:]].sum()
        count += len(ids) - 1
    return float(np.exp(total / count))


@pytest.fixture
def heldout(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Tokens of stories that the demo model was not trained on."""
    tools = Path(__file__).parents[2] / "tools" / "demo_model"
    monkeypatch.syspath_prepend(str(tools))
    records = importlib.import_module("corpus").story_records(0, 6000)
    texts = [record["text"] for record in records if record["split"] == "heldout"]
    tokenizer = plan_of().checkpoint.load_tokenizer()
    return [tokenizer.encode(text)[:TOKENS] for text in texts[:NUM_TEXTS]]


@pytest.mark.parametrize(
    ("quantization", "percent"),
    [("int8", 0.5), ("int4", 3.0), ({"name": "int4", "group_size": 64}, 3.0), ("fp8", 0.5)],
    ids=["int8", "int4", "int4_groups_of_64", "fp8"],
)
def test_perplexity_rises_by_few_percent(
    quantization: Any, percent: float, heldout: list[list[int]]
) -> None:
    plain = ReferenceModel(plan_of())
    exact = perplexity(plain, heldout)
    weights = plan_of(quantization=quantization).load_weights()
    plain.weights = {
        path: quantized_weight(w).astype(np.float32) if isinstance(w, QuantizedArray) else w
        for path, w in weights.items()
    }
    rounded = perplexity(plain, heldout)
    print(f"perplexity {exact:.5f}, with {quantization} {rounded:.5f}")
    assert abs(rounded / exact - 1) < percent / 100


@pytest.mark.parametrize(("quantization", "percent"), [("int8", 0.5), ("int4", 3.0)])
def test_rounded_activations_keep_the_perplexity(
    quantization: str, percent: float, heldout: list[list[int]]
) -> None:
    exact = perplexity(ReferenceModel(plan_of()), heldout)
    rounded = plan_of(quantization=quantization, activation_quantization="int8")
    found = perplexity(ReferenceModel(rounded), heldout)
    print(f"perplexity {exact:.5f}, with {quantization} and int8 activations {found:.5f}")
    assert abs(found / exact - 1) < percent / 100


@pytest.mark.parametrize(
    ("quantization", "bits"), [("int8", 8.0), ("fp8", 8.0), ("int4", 4.5)], ids=str
)
def test_memory_is_that_of_the_bits(quantization: str, bits: float) -> None:
    """Within 10 percent: bits of each number, 8 in the embedding, and 32 in norms."""
    plan = plan_of(quantization=quantization)
    held = sum(a.on_device_size_in_bytes() for a in jax.tree.leaves(plan.load_weights()))
    wanted = 0.0
    for spec in plan.model.weight_specs().values():
        each = 32.0 if spec.num_inputs is None else 8.0 if "vocab" in spec.axes else bits
        wanted += each / 8 * np.prod(spec.shape)
    print(f"{quantization}: {held} bytes, {wanted:.0f} by arithmetic")
    assert 1.0 <= held / wanted < 1.1
