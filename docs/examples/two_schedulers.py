"""Run the same requests under two schedulers: the steps differ, the tokens are equal."""

from enginebay import LLM, SamplingParams

PROMPTS = ["Once upon a time", "The", "One day, a small dog went to the park and"]
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)

answers = {}
for scheduler in ("fcfs", "static"):
    with LLM("demo", scheduler=scheduler, max_model_len=256, max_num_seqs=4) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
    answers[scheduler] = [output.outputs[0].token_ids for output in outputs]
    waits = [output.metrics.time_to_first_token_s for output in outputs]
    print(f"{scheduler}: first tokens after {', '.join(f'{wait * 1000:.0f} ms' for wait in waits)}")

print("equal tokens" if answers["fcfs"] == answers["static"] else "tokens differ")
