"""The whole engine against stored greedy tokens of transformers: every family, unequal prompts in one batch, 1 to 4 devices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from enginebay import LLM, SamplingParams
from enginebay.testing.reference import ReferenceModel
from enginebay.testing.ties import TOLERANCE, assert_same_tokens
from tests.parity import tiny

GREEDY = SamplingParams(max_tokens=tiny.NUM_NEW_TOKENS, temperature=0.0, ignore_eos=True)
VARIANTS = ("llama-tied", "llama-rope-llama3", "mistral-window", "qwen2-some-windows", "qwen3-yarn-biases")
"""One or two of each family: test_goldens.py holds the logits of all of them at the model's level."""

ENGINES: dict[str, Any] = {
    "vinference": "vinference",
    "oengine": {"name": "oengine", "page_size": 16, "num_pages": 1 + 640 // 16},
}
"""The pages are too few for all prompts at once."""

CHOICES: dict[str, Any] = {
    "engine": "vinference",
    "dtype": "float32",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
}


def check(folder: Path, variant: str, **choices: Any) -> None:
    """All prompts at once: the longest are cut into chunks, and rows of all lengths decode together."""
    goldens, _ = tiny.read_golden(variant)
    with LLM(str(tiny.write_checkpoint(folder, variant)), **(CHOICES | choices)) as llm:
        outputs = [o.outputs[0].token_ids for o in llm.generate(tiny.prompts(), GREEDY)]
        assert_same_tokens(
            ReferenceModel(llm.plan, llm.engine.runner.weights), tiny.prompts(), goldens, outputs, GREEDY
        )


def engine_cases() -> Iterator[Any]:
    """Every variant on every engine; all but one on pages are slow, because they compile everything once more."""
    for variant in VARIANTS:
        yield pytest.param("vinference", variant)
        slow = () if variant == "mistral-window" else pytest.mark.slow
        yield pytest.param("oengine", variant, marks=slow)


@pytest.mark.parametrize(("engine", "variant"), list(engine_cases()))
def test_engine_gives_the_tokens_of_transformers(engine: str, variant: str, tmp_path: Path) -> None:
    check(tmp_path, variant, engine=ENGINES[engine])


@pytest.mark.parametrize(
    ("variant", "num_devices"),
    [("mistral-window", 2), ("qwen3-tied", 4)],
)
def test_sharded_engine_gives_the_tokens_of_transformers(
    variant: str, num_devices: int, tmp_path: Path
) -> None:
    if len(jax.devices()) < num_devices:
        pytest.skip(f"needs {num_devices} devices, there are {len(jax.devices())}")
    check(tmp_path, variant, mesh={"tensor": num_devices})


def test_sampled_tokens_do_not_depend_on_the_mesh(tmp_path: Path) -> None:
    if len(jax.devices()) < 2:
        pytest.skip(f"needs 2 devices, there are {len(jax.devices())}")
    folder = str(tiny.write_checkpoint(tmp_path, "llama-mha"))
    params = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, seed=5, ignore_eos=True)
    outputs = []
    for mesh in ({"tensor": 2}, {}):
        with LLM(folder, mesh=mesh, **CHOICES) as llm:
            outputs.append([o.outputs[0].token_ids for o in llm.generate(tiny.prompts(), params)])
            reference = ReferenceModel(llm.plan, llm.engine.runner.weights)
    assert_same_tokens(reference, tiny.prompts(), *outputs, params)


def test_narrow_dtypes_stay_within_twice_the_rounding_of_their_weights(tmp_path: Path) -> None:
    """bf16 logits of whole sequences err from f32 by no more than a few roundings (the bound against transformers is live)."""
    folder = str(tiny.write_checkpoint(tmp_path, "llama-mha"))
    logits = {}
    for dtype in ("float32", "bfloat16", "float16"):
        with LLM(folder, **(CHOICES | {"dtype": dtype})) as llm:
            assert (
                len(llm.generate([tiny.prompts()[3]], GREEDY)[0].outputs[0].token_ids) == tiny.NUM_NEW_TOKENS
            )
            logits[dtype] = ReferenceModel(llm.plan, llm.engine.runner.weights).logits(tiny.prompts()[3])
    scale = np.abs(logits["float32"]).max()
    for dtype, rounding in (("bfloat16", 2**-8), ("float16", 2**-11)):
        error = np.abs(logits[dtype] - logits["float32"]).max() / scale
        assert 0 < error < 16 * rounding, f"{dtype} logits err by {error:.1e} of their scale"


def test_tolerance_is_tighter_than_what_separates_tokens() -> None:
    """Otherwise forgiving near-ties would forgive everything."""
    gaps = []
    for variant in tiny.CONFIGS:
        for logits in tiny.read_golden(variant)[1]:
            best = np.sort(logits, axis=1)[:, -2:]
            gaps.append(best[:, 1] - best[:, 0])
    assert np.mean(np.concatenate(gaps) > TOLERANCE) > 0.99
