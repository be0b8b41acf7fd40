"""The whole engine against stored greedy tokens of transformers: every family, unequal prompts in
one batch, 1 to 4 devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from enginebay import LLM, EngineConfig, SamplingParams
from enginebay.compose.composition import make_plan
from enginebay_testing.near_ties import TOLERANCE, assert_same_tokens
from enginebay_testing.reference import ReferenceModel
from tests.parity import tiny

GREEDY = SamplingParams(max_tokens=tiny.NUM_NEW_TOKENS, temperature=0.0, ignore_eos=True)
VARIANTS = (
    "gemma3-mixed",
    "gpt2-plain",
    "llama-tied",
    "llama-rope-llama3",
    "mistral-window",
    "mpt-clipped",
    "qwen2-some-windows",
    "qwen3-yarn-biases",
    "qwen3_moe-normed",
)
"""One or two of each family: test_goldens.py holds the logits of all of them at the model's level.
"""

RARE = ("llama-rope-llama3", "qwen3-yarn-biases")
"""Variants that differ from others in their rotary frequencies alone."""

ENGINES: dict[str, Any] = {
    "vinference": "vinference",
    "oengine": {"name": "oengine", "page_size": 16, "num_pages": 1 + 640 // 16},
}
"""The pages are too few for all prompts at once."""

CHOICES: dict[str, Any] = {
    "generation_config": "none",
    "engine": "vinference",
    "dtype": "float32",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
}


def check(folder: Path, variant: str, **choices: Any) -> None:
    """All prompts at once: the longest are cut into chunks, and rows of all lengths decode
    together.
    """
    goldens, _ = tiny.read_golden(variant)
    with LLM(str(tiny.write_checkpoint(folder, variant)), **(CHOICES | choices)) as llm:
        outputs = [o.outputs[0].token_ids for o in llm.generate(tiny.prompts(), GREEDY)]
        assert_same_tokens(
            ReferenceModel(llm.plan, llm.engine.executor.weights()),
            tiny.prompts(),
            goldens,
            outputs,
            GREEDY,
        )


def engine_cases() -> Iterator[Any]:
    """Every variant on every engine; each engine, family and kind of attention is quick once.

    A test below has "mistral-window" on the contiguous engine, and another one tied embeddings.
    """
    for variant in VARIANTS:
        quick = {
            "gemma3-mixed": "oengine",
            "gpt2-plain": None,
            "mistral-window": None,
            "mpt-clipped": None,
            "llama-tied": None,
            "qwen3_moe-normed": None,
        }.get(variant, "vinference")
        for engine in ENGINES:
            rare = pytest.mark.long if variant in RARE else ()
            yield pytest.param(engine, variant, marks=rare if engine == quick else pytest.mark.slow)


@pytest.mark.parametrize(("engine", "variant"), list(engine_cases()))
def test_engine_gives_the_tokens_of_transformers(engine: str, variant: str, tmp_path: Path) -> None:
    check(tmp_path, variant, engine=ENGINES[engine])


@pytest.mark.long
def test_engine_with_split_heads_gives_the_tokens_of_transformers(tmp_path: Path) -> None:
    if len(jax.devices()) < 4:
        pytest.skip(f"needs 4 devices, there are {len(jax.devices())}")
    check(tmp_path, "qwen3-tied", mesh={"tensor": 4})


@pytest.mark.long
def test_tokens_do_not_depend_on_the_mesh(tmp_path: Path) -> None:
    """Sampled rows, and greedy ones, which get the tokens of transformers; windows and chunks."""
    if len(jax.devices()) < 2:
        pytest.skip(f"needs 2 devices, there are {len(jax.devices())}")
    folder = str(tiny.write_checkpoint(tmp_path, "mistral-window"))
    greedy = GREEDY.model_copy(
        update={"max_tokens": 24}
    )  # all end at once, so that few programs are compiled
    hot = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, seed=5, ignore_eos=True)
    prompts, goldens = (
        tiny.prompts(),
        [tokens[:24] for tokens in tiny.read_golden("mistral-window")[0]],
    )
    asked = [*((prompt, hot) for prompt in prompts[2:4]), *((prompt, greedy) for prompt in prompts)]
    most = 512
    assert most < sum(len(prompt) for prompt, _ in asked)
    sampled = []
    for mesh in ({"tensor": 2}, {}):
        with LLM(folder, mesh=mesh, **(CHOICES | {"max_num_batched_tokens": most})) as llm:
            outputs = llm.generate([prompt for prompt, _ in asked], [params for _, params in asked])
            reference = ReferenceModel(llm.plan, llm.engine.executor.weights())
        tokens = [output.outputs[0].token_ids for output in outputs]
        assert_same_tokens(reference, prompts, goldens, tokens[2:], greedy)
        sampled.append(tokens[:2])
    assert_same_tokens(reference, prompts[2:4], *sampled, hot)


@pytest.mark.long
def test_narrow_dtypes_err_by_at_most_eight_roundings(tmp_path: Path) -> None:
    """Logits of whole sequences, as a share of the largest, against those in float32. The bound
    against transformers is in test_live_transformers.py.
    """
    folder, prompt = str(tiny.write_checkpoint(tmp_path, "llama-mha")), tiny.prompts()[3]
    exact = ReferenceModel(make_plan(EngineConfig(model=folder, **CHOICES))).logits(prompt)
    for dtype, rounding in (("bfloat16", 2**-8), ("float16", 2**-11)):
        with LLM(folder, **(CHOICES | {"dtype": dtype})) as llm:
            assert (
                len(llm.generate([prompt], GREEDY)[0].outputs[0].token_ids) == tiny.NUM_NEW_TOKENS
            )
            logits = ReferenceModel(llm.plan, llm.engine.executor.weights()).logits(prompt)
        error = np.abs(logits - exact).max() / np.abs(exact).max()
        assert 0 < error < 8 * rounding, f"{dtype} logits err by {error:.1e} of their scale"


def test_tolerance_is_tighter_than_what_separates_tokens() -> None:
    """Otherwise forgiving near-ties would forgive everything."""
    gaps = []
    for variant in tiny.CONFIGS:
        for logits in tiny.read_golden(variant)[1]:
            best = np.sort(logits, axis=1)[:, -2:]
            gaps.append(best[:, 1] - best[:, 0])
    assert np.mean(np.concatenate(gaps) > TOLERANCE) > 0.99
