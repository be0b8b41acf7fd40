"""Serve an asyncio program: a stream and a batch run together in one engine."""

import asyncio

from enginebay import LLM, SamplingParams


async def stream(llm: LLM) -> str:
    text = ""
    async for chunk in llm.astream("Once upon a time", SamplingParams(max_tokens=24)):
        text += chunk.delta_text
    return text


async def main() -> None:
    with LLM("demo", max_model_len=256, max_num_seqs=4) as llm:
        story, batch = await asyncio.gather(
            stream(llm),
            llm.agenerate(["One day, a cat", "There was a boy"], SamplingParams(max_tokens=16)),
        )
    print(story)
    for output in batch:
        print(output.get_text())


asyncio.run(main())
