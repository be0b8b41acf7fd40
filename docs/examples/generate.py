"""Complete several prompts at once, each with its own sampling parameters."""

from enginebay import LLM, SamplingParams

PROMPTS = ["Once upon a time", "One day, a small dog"]
PARAMS = [
    SamplingParams(max_tokens=24),
    SamplingParams(max_tokens=24, temperature=0.8, top_p=0.95, seed=3),
]

with LLM("demo", max_model_len=256, max_num_seqs=4) as llm:
    for output in llm.generate(PROMPTS, PARAMS):
        completion = output.outputs[0]
        print(
            f"{output.prompt}|{completion.text} ({completion.finish_reason}, "
            f"{len(completion.token_ids)} tokens)"
        )
