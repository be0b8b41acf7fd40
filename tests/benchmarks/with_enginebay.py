"""enginebay in the contest: `python -m tests.benchmarks.with_enginebay FOLDER DTYPE ROUNDS [ENGINE]`."""

from __future__ import annotations

import sys

from tests.benchmarks import contest


def main(folder: str, dtype: str, rounds: str, engine: str = "auto") -> None:
    """Load, warm every program up, and run."""
    from enginebay import LLM, SamplingParams

    with LLM(folder, dtype=dtype, engine=engine, max_model_len=1536, max_num_seqs=32) as llm:

        def generate(prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
            params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in lengths]
            return [o.outputs[0].token_ids for o in llm.generate(prompts, params)]

        contest.run(generate, lambda: print(f"# {llm.warmup()} programs", file=sys.stderr), int(rounds))


if __name__ == "__main__":
    main(*sys.argv[1:])
