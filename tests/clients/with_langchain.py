"""Run by the Python of LangChain's environment: `with_langchain.py URL KEY`. Prints what it got, as
JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Literal

import openai
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel

URL, KEY = sys.argv[1:]
AT: dict[str, Any] = {"base_url": f"{URL}/v1", "api_key": KEY, "max_retries": 0}
CALL = '<tool_call>{"name": "paint", "arguments": {"color": "red"}}</tool_call>'


class Weather(BaseModel):
    """The weather of a day."""

    kind: Literal["sun", "rain"]


@tool
def paint(color: Literal["red", "blue"]) -> str:
    """Paint a wall."""
    return f"a {color} wall"


def chat(**fields: Any) -> ChatOpenAI:
    return ChatOpenAI(**{"model": "demo", "max_tokens": 8, **AT, **fields})


def error_of(model: ChatOpenAI, text: str = "Hello!") -> list[Any]:
    try:
        model.invoke(text)
    except openai.APIStatusError as error:
        return [type(error).__name__, error.status_code]
    return ["no error"]


def calls(message: AIMessage) -> list[Any]:
    return [[one["name"], one["args"]] for one in message.tool_calls]


async def asynchronous() -> list[str]:
    streamed = "".join([str(chunk.content) async for chunk in chat().astream("Hello!")])
    return [str((await chat().ainvoke("Hello!")).content), streamed]


def structured(method: str, **fields: Any) -> Any:
    model = chat(max_tokens=40).with_structured_output(Weather, method=method, **fields)
    found = model.invoke("Answer with JSON: what is the weather?")
    return found.model_dump() if isinstance(found, BaseModel) else found


def main() -> dict[str, Any]:
    whole = chat().invoke("Hello!")
    chunks = list(chat(stream_usage=True).stream("Hello!"))
    joined = chunks[0]
    for chunk in chunks[1:]:
        joined = joined + chunk
    told = chat(logprobs=True, top_logprobs=2).invoke("Hello!").response_metadata["logprobs"]
    bound = chat(max_tokens=60).bind_tools([paint], tool_choice="any", parallel_tool_calls=False)
    demanded = bound.invoke("Paint it.")
    pieces = list(bound.stream("Paint it."))
    streamed_call = pieces[0]
    for piece in pieces[1:]:
        streamed_call = streamed_call + piece
    named = chat(max_tokens=60).bind_tools([paint], tool_choice="paint").invoke("Paint it.")
    free = chat(max_tokens=100, extra_body={"guided_choice": [CALL]}).bind_tools([paint])
    conversation = [
        SystemMessage("Be kind."),
        HumanMessage("Paint it."),
        demanded,
        ToolMessage(paint.invoke(demanded.tool_calls[0]["args"]), tool_call_id="1"),
    ]
    return {
        "chat": whole.content,
        "usage": whole.usage_metadata,
        "finish_reason": whole.response_metadata["finish_reason"],
        "streamed": joined.content,
        "stream_usage": joined.usage_metadata,
        "batch": [one.content for one in chat().batch(["Hello!", "Why?"])],
        "asynchronous": asyncio.run(asynchronous()),
        "logprobs": [entry["logprob"] for entry in told["content"]],
        "stopped": chat(stop=["\n"]).invoke("Hello!").content,
        "demanded": calls(demanded),
        "demanded_stream": calls(streamed_call),
        "named": calls(named),
        "chosen": calls(free.invoke("Paint it.")),
        "after_tool": isinstance(chat().invoke(conversation).content, str),
        "json_schema": structured("json_schema"),
        "function_calling": structured("function_calling"),
        "strict": structured("function_calling", strict=True),
        "completion": OpenAI(model="demo", max_tokens=8, temperature=0, **AT).invoke("One day"),
        "embedding": OpenAIEmbeddings(model="demo", check_embedding_ctx_length=False, **AT)
        .embed_query("One day"),
        "response": chat(use_responses_api=True).invoke("Hello!").text,
        "response_stream": "".join(
            chunk.text for chunk in chat(use_responses_api=True).stream("Hello!")
        ),
        "errors": {
            "key": error_of(chat(api_key="another-key")),
            "model": error_of(chat(model="other")),
            "field": error_of(chat(temperature=-1)),
            "length": error_of(chat(), "a cat " * 600),
        },
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(main()))
