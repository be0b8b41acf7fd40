"""What a quantised cache does to the demo model on text that it was not trained on."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from enginebay import LLM
from enginebay.keywords import CacheDtype
from enginebay_bench.evaluate import EvalSizes, Evaluation, evaluate

CORPUS = Path(__file__).parents[2] / "tools" / "demo_model" / "corpus.py"
PROMPTS, LENGTH = 200, 128


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
