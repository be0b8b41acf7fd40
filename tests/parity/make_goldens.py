"""Writes the stored reference outputs: greedy tokens and logits of transformers on torch, in f32,
of variants and demo, and what it derives from generated configurations.

Run with torch installed, from the repository's root: python -m tests.parity.make_goldens
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

from tests.parity import demo, derived, tiny
from tests.parity.reference import greedy, load_reference, logits_of


def make(variant: str, folder: Path) -> None:
    """Write goldens/<variant>.npz."""
    model = load_reference(tiny.write_checkpoint(folder / variant, variant), "float32")
    token_ids, logits = [], []
    for prompt in tiny.prompts():
        tokens = greedy(model, prompt, tiny.NUM_NEW_TOKENS)
        token_ids.append(tokens)
        logits.append(logits_of(model, [*prompt, *tokens])[tiny.golden_positions(len(prompt))])
    tiny.write_golden(variant, token_ids, np.concatenate(logits))


def main() -> int:
    """Write all of them."""
    tiny.GOLDENS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for variant in tiny.CONFIGS:
            make(variant, Path(folder))
            print(f"{variant}: {(tiny.GOLDENS / f'{variant}.npz').stat().st_size} bytes")
    demo.make()
    derived.make()
    return 0


if __name__ == "__main__":
    sys.exit(main())
