"""Print a completion while it is generated, and stop at the first full stop."""

from enginebay import LLM, SamplingParams

with LLM("demo", max_model_len=256, max_num_seqs=4) as llm:
    params = SamplingParams(
        max_tokens=40, temperature=0.7, seed=7, stop=(".",), include_stop_str_in_output=True
    )
    for chunk in llm.stream("Once upon a time", params):
        print(chunk.delta_text, end="", flush=True)
    print()
