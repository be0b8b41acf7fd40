"""Random configurations of families against transformers, run here: logits and greedy tokens."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

from enginebay_testing.model_harness import greedy_mismatch, teacher_forced
from tests.parity import family_zoo, reference, tiny
from tests.parity.test_goldens import TOLERANCE, loaded_from

NUM_CONFIGS, PARTS, NUM_NEW = 50, 5, 6
PROMPT_LENGTHS = (3, 25)


@pytest.mark.torch
@pytest.mark.parametrize("part", range(PARTS), ids="part-{}".format)
@pytest.mark.parametrize("name", family_zoo.ZOOS)
def test_random_configurations_agree_with_transformers(
    name: str, part: int, tmp_path: Path
) -> None:
    family = importlib.import_module(f"enginebay_models.{name}").family
    for index in range(part, NUM_CONFIGS, PARTS):
        config = family_zoo.draw(name, index)
        folder = tiny.write_weights(tmp_path / str(index), family, config)
        model = reference.load_reference(folder, "float32")
        rng = np.random.default_rng(index)
        prompts = [
            rng.integers(0, family_zoo.VOCAB_SIZE, length).tolist() for length in PROMPT_LENGTHS
        ]
        tokens = [reference.greedy(model, prompt, NUM_NEW) for prompt in prompts]
        ours = teacher_forced(loaded_from(folder, family), prompts, tokens)
        for prompt, new, logits in zip(prompts, tokens, ours, strict=True):
            error = np.abs(logits - reference.logits_of(model, [*prompt, *new])).max()
            assert error <= TOLERANCE, f"logits differ by {error:.1e}: {config}"
            assert greedy_mismatch(logits[len(prompt) - 1 : -1], new, TOLERANCE) is None, config
