"""enginebay in the contest: `python -m tests.benchmarks.with_enginebay FOLDER DTYPE ROUNDS [ENGINE
[COMPILE_CACHE [NAME=VALUE ...]]]`.
"""

from __future__ import annotations

import sys

from tests.benchmarks import contest


def main(
    folder: str,
    dtype: str,
    rounds: str,
    engine: str = "auto",
    compile_cache: str = "auto",
    *more: str,
) -> None:
    """Load and run; `compile_cache` is a folder of programs, auto (the user's own) or off. `more`:
    other arguments of LLM, such as quantization=int8.
    """
    from enginebay import LLM, SamplingParams

    choices = {"dtype": dtype, "engine": engine, "compile_cache": compile_cache}
    choices |= dict(text.split("=", 1) for text in more)
    with LLM(
        folder, **choices, generation_config="none", max_model_len=1536, max_num_seqs=32
    ) as llm:

        def generate(prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
            params = [
                SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in lengths
            ]
            return [o.outputs[0].token_ids for o in llm.generate(prompts, params)]

        def warm() -> None:
            print(f"# {llm.warmup()} programs", file=sys.stderr)

        def num_compiled() -> int:
            return llm.engine.compilations.count

        contest.run(contest.Contestant(generate, warm, num_compiled), int(rounds))


if __name__ == "__main__":
    main(*sys.argv[1:])
