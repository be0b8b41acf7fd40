"""Hold a conversation of two turns."""

from enginebay import LLM, SamplingParams

messages: list[dict[str, str]] = []
with LLM("demo", max_model_len=256, max_num_seqs=4) as llm:
    for question in ("Hello!", "What color is the sky?"):
        messages.append({"role": "user", "content": question})
        answer = llm.chat(messages, SamplingParams(max_tokens=24)).get_text()
        messages.append({"role": "assistant", "content": answer})
        print(f"> {question}\n{answer}")
