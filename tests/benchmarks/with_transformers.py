"""transformers on torch in the contest: `python -m tests.benchmarks.with_transformers FOLDER DTYPE
ROUNDS`.
"""

from __future__ import annotations

import sys

from tests.benchmarks import contest

THREADS = 2


def main(folder: str, dtype: str, rounds: str) -> None:
    """Load and run: generate() with its dynamic cache, batches padded on the left."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(THREADS)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="sdpa"
    ).eval()
    model.generation_config.eos_token_id = None

    def generate(prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=max(lengths),
                do_sample=False,
                pad_token_id=0,
            )
        return [row[:n] for row, n in zip(out[:, longest:].tolist(), lengths, strict=True)]

    contest.run(contest.Contestant(generate), int(rounds))


if __name__ == "__main__":
    main(*sys.argv[1:])
