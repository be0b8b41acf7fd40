"""Each family against transformers, run here instead of stored: logits and greedy tokens, and how far off bfloat16 is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from enginebay.testing.model_harness import greedy_mismatch, teacher_forced
from tests.parity import reference, tiny
from tests.parity.test_goldens import TOLERANCE, loaded

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("variant", tiny.CONFIGS)
def test_logits_and_greedy_tokens_in_f32(variant: str, tmp_path: Path) -> None:
    harness = loaded(tmp_path, variant)
    model = reference.load_reference(tmp_path, "float32")
    prompts = tiny.prompts()[2:]
    tokens = [reference.greedy(model, prompt, 24) for prompt in prompts]
    for prompt, new, ours in zip(prompts, tokens, teacher_forced(harness, prompts, tokens), strict=True):
        theirs = reference.logits_of(model, [*prompt, *new])
        assert np.abs(ours - theirs).max() <= TOLERANCE
        assert greedy_mismatch(ours[len(prompt) - 1 : -1], new, TOLERANCE) is None


@pytest.mark.parametrize("variant", ["llama-tied", "mistral-window", "qwen2-tied", "qwen3-tied"])
def test_bf16_is_at_most_twice_as_far_off_as_transformers(variant: str, tmp_path: Path) -> None:
    harness = loaded(tmp_path, variant, dtype="bfloat16")
    exact, rounded = (reference.load_reference(tmp_path, dtype) for dtype in ("float32", "bfloat16"))
    prompts = tiny.prompts()[2:5]
    for prompt, ours in zip(prompts, teacher_forced(harness, prompts, [[]] * len(prompts)), strict=True):
        truth = reference.logits_of(exact, prompt)
        theirs = reference.logits_of(rounded, prompt)
        error, allowed = (float(np.sqrt(np.mean((x - truth) ** 2))) for x in (ours, theirs))
        assert error <= 2 * allowed, f"prompt of {len(prompt)}: {error:.4f}, transformers {allowed:.4f}"
