"""Each family against stored outputs of transformers: logits within 1e-4 in f32, and 64 greedy
tokens.
"""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from enginebay.contracts.model import ModelFamily
from enginebay.weights import WeightFormat
from enginebay_models.source import CheckpointSource
from enginebay_testing.model_harness import (
    ModelHarness,
    greedy_mismatch,
    place_over,
    teacher_forced,
)
from tests.parity import tiny
from tests.parity.ops import plain_ops

TOLERANCE = 1e-4
# A model whose KV heads are split, one whose heads are repeated, one with two cache groups, and one
# whose experts are split.
SHARDED = [
    ("llama-tied", 2),
    ("qwen3-tied", 4),
    ("qwen2-some-windows", 2),
    *(pytest.param("gemma3-mixed", count, marks=pytest.mark.slow) for count in (2, 4)),
    pytest.param("qwen3_moe-normed", 2, marks=pytest.mark.slow),
    ("qwen3_moe-normed", 4),
    *(pytest.param("deepseek_v2-grouped", count, marks=pytest.mark.slow) for count in (2, 4)),
    *(pytest.param("mpt-clipped", count, marks=pytest.mark.slow) for count in (2, 4)),
    *(pytest.param("gpt2-plain", count, marks=pytest.mark.slow) for count in (2, 4)),
    *(
        pytest.param(variant, count, marks=pytest.mark.slow)
        for variant in tiny.RARELY
        for count in (2, 4)
    ),
]
RARELY = (
    *("deepseek_v2-plain-queries", "gemma3-untied", "gpt2-unscaled", "mpt-six-heads"),
    *tiny.RARELY,
)
LONG = (
    *("lfm2-biases", "llama-biases", "llama-mha", "llama-rope-linear", "llama-tied"),
    *("mistral-full", "qwen2-tied", "qwen3-tied", "qwen3_moe-some-plain"),
)
"""Variants of families that have another variant in `make test`."""


def marks_of(variant: str) -> list[pytest.MarkDecorator]:
    if variant in RARELY:
        return [pytest.mark.slow]
    return [pytest.mark.long] if variant in LONG else []


def loaded(
    folder: Path, variant: str, *, num_devices: int = 1, dtype: str = "float32"
) -> ModelHarness:
    written = tiny.write_checkpoint(folder, variant)
    return loaded_from(written, tiny.family_of(variant), num_devices=num_devices, dtype=dtype)


def loaded_from(
    folder: Path, family: ModelFamily, *, num_devices: int = 1, dtype: str = "float32"
) -> ModelHarness:
    source = CheckpointSource(str(folder))
    placement = place_over(num_devices)
    model = family.build(source.config, dtype=dtype, num_shards=num_devices)
    weights = source.load_weights(model, form=WeightFormat(dtype), place=placement.weight)
    return ModelHarness(
        model, weights, plain_ops, placement, num_rows=len(tiny.PROMPT_LENGTHS), capacity=384
    )


def check(harness: ModelHarness, variant: str, prompt_indices: list[int]) -> None:
    every_token_ids, every_logits = tiny.read_golden(variant)
    prompts = [tiny.prompts()[i] for i in prompt_indices]
    token_ids = [every_token_ids[i] for i in prompt_indices]
    compared = 0
    for index, prompt, ours in zip(
        prompt_indices, prompts, teacher_forced(harness, prompts, token_ids), strict=True
    ):
        theirs = every_logits[index]
        own = tiny.stored_part(variant, ours[tiny.golden_positions(len(prompt))])
        error = np.abs(own - theirs).max()
        assert error <= TOLERANCE, f"prompt of {len(prompt)}: logits differ by {error:.1e}"
        new = ours[len(prompt) - 1 : -1]
        assert greedy_mismatch(new, every_token_ids[index], TOLERANCE) is None, (
            f"prompt of {len(prompt)}"
        )
        second, first = np.partition(new, -2)[:, -2:].T
        compared += int(np.all(first - second >= TOLERANCE))
    assert compared >= len(prompts) - 1, "too many rows have scores that are too close to compare"


@pytest.mark.parametrize(
    "variant",
    [pytest.param(variant, marks=marks_of(variant)) for variant in tiny.CONFIGS],
)
def test_model_agrees_with_transformers(variant: str, tmp_path: Path) -> None:
    check(loaded(tmp_path, variant), variant, list(range(len(tiny.PROMPT_LENGTHS))))


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(variant, marks=[] if variant in tiny.QUICK else [pytest.mark.long])
        for variant in tiny.RARELY
    ],
)
def test_one_prompt_agrees_with_transformers(variant: str, tmp_path: Path) -> None:
    check(loaded(tmp_path, variant), variant, [2])


@pytest.mark.long
@pytest.mark.parametrize(("variant", "num_devices"), SHARDED)
def test_sharded_model_agrees_with_transformers(
    variant: str, num_devices: int, tmp_path: Path
) -> None:
    if len(jax.devices()) < num_devices:
        pytest.skip(f"needs {num_devices} devices, there are {len(jax.devices())}")
    check(loaded(tmp_path, variant, num_devices=num_devices), variant, [2, 3, 4])


def test_goldens_are_small_and_complete() -> None:
    files = sorted(tiny.GOLDENS.iterdir())
    assert [file.stem for file in files] == sorted(tiny.CONFIGS)
    assert sum(file.stat().st_size for file in files) < 1_000_000
