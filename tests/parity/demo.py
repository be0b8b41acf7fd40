"""Prompts for the demo model, and what transformers makes of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import enginebay_models
from tests.parity.tiny import GOLDENS

FOLDER = Path(enginebay_models.__file__).parent / "demo"
STORED = GOLDENS.parent / "demo.npz"
PROMPT_LENGTHS = (1, 5, 40, 300)
NUM_NEW_TOKENS = 64
TOP = 16
"""How many of the best logits are stored for the last token of each prompt."""


def prompts() -> list[list[int]]:
    """Random prompts; the demo model's vocabulary is 2048."""
    rng = np.random.default_rng(7)
    return [[int(i) for i in rng.integers(4, 2048, length)] for length in PROMPT_LENGTHS]


def make() -> None:
    """Store greedy tokens, and the TOP best logits after each prompt with their ids (needs
    torch).
    """
    from tests.parity.reference import greedy, load_reference, logits_of

    model = load_reference(FOLDER, "float32")
    tokens = [greedy(model, prompt, NUM_NEW_TOKENS) for prompt in prompts()]
    last = np.stack([logits_of(model, prompt)[-1] for prompt in prompts()])
    best = np.argsort(-last, axis=1)[:, :TOP]
    logits = np.take_along_axis(last, best, axis=1)
    np.savez_compressed(
        STORED, token_ids=np.asarray(tokens, np.int16), best=best.astype(np.int16), logits=logits
    )
