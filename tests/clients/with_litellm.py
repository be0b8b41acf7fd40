"""Run by the Python of LiteLLM's environment: `with_litellm.py URL KEY`. Prints what it got, as
JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import litellm
import openai

URL, KEY = sys.argv[1:]
HELLO = [{"role": "user", "content": "Hello!"}]
AT: dict[str, Any] = {"api_base": f"{URL}/v1", "api_key": KEY, "num_retries": 0}
CHAT: dict[str, Any] = {"model": "openai/demo", "messages": HELLO, "max_tokens": 8, **AT}
AGE = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["age"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "set_age", "parameters": AGE}}
CALL = '<tool_call>{"name": "set_age", "arguments": {"age": 7}}</tool_call>'


def error_of(**fields: Any) -> list[Any]:
    try:
        litellm.completion(**{**CHAT, **fields})
    except openai.APIStatusError as error:
        return [type(error).__name__, error.status_code]
    return ["no error"]


async def asynchronous() -> str:
    stream = await litellm.acompletion(**CHAT, stream=True)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


def text(answer: Any) -> str:
    return answer.choices[0].message.content


def calls(answer: Any) -> list[Any]:
    found = answer.choices[0].message.tool_calls or []
    return [[one.function.name, json.loads(one.function.arguments)] for one in found]


whole = litellm.completion(**CHAT)
chunks = list(litellm.completion(**CHAT, stream=True, stream_options={"include_usage": True}))
told = litellm.completion(**CHAT, logprobs=True, top_logprobs=2).choices[0].logprobs
several = litellm.completion(**CHAT, n=2, temperature=1.0, seed=3)
demanded = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
tool_stream = litellm.completion(**{**CHAT, "max_tokens": 60}, **demanded, stream=True)
free = {"tools": [TOOL], "extra_body": {"guided_choice": [CALL]}}
form = {"type": "json_schema", "json_schema": {"name": "age", "schema": AGE, "strict": True}}
AS_TEXT = {**AT, "model": "text-completion-openai/demo", "prompt": "One day", "max_tokens": 8}
vectors = litellm.embedding(model="openai/demo", input=["One day", "The cat"], **AT)
response = litellm.responses(model="openai/demo", input="Hello!", max_output_tokens=8, **AT)
print(
    json.dumps(
        {
            "chat": text(whole),
            "usage": whole.usage.model_dump(include={"prompt_tokens", "completion_tokens"}),
            "finish_reason": whole.choices[0].finish_reason,
            "hosted": text(litellm.completion(**{**CHAT, "model": "hosted_vllm/demo"})),
            "streamed": "".join(c.choices[0].delta.content or "" for c in chunks if c.choices),
            "rebuilt": text(litellm.stream_chunk_builder(chunks, messages=HELLO)),
            "stream_usage": [c.usage.total_tokens for c in chunks if getattr(c, "usage", None)],
            "asynchronous": asyncio.run(asynchronous()),
            "logprobs": [entry.logprob for entry in told.content],
            "several": [choice.message.content for choice in several.choices],
            "completion": litellm.text_completion(**AS_TEXT).choices[0].text,
            "completion_stream": "".join(
                chunk.choices[0].text or ""
                for chunk in litellm.text_completion(**AS_TEXT, stream=True)
            ),
            "json": json.loads(
                text(litellm.completion(**{**CHAT, "max_tokens": 40}, response_format=form))
            ),
            "demanded": calls(litellm.completion(**{**CHAT, "max_tokens": 60}, **demanded)),
            "demanded_stream": calls(litellm.stream_chunk_builder(list(tool_stream))),
            "chosen": calls(litellm.completion(**{**CHAT, "max_tokens": 100}, **free)),
            "embedding": [entry["embedding"] for entry in vectors.data],
            "response": response.output[0].content[0].text,
            "errors": {
                "key": error_of(api_key="another-key"),
                "model": error_of(model="openai/other"),
                "field": error_of(temperature=-1),
                "length": error_of(messages=[{"role": "user", "content": "a cat " * 600}]),
            },
        }
    )
)
