"""Answers runs with an OpenAI-compatible server: python http_peer.py ADDRESS [MODEL].

The server must take prompts of token ids in /v1/completions. The key is read from OPENAI_API_KEY.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import sys
import time
import urllib.request
from typing import Any


def opened(address: str, body: dict[str, Any] | None = None) -> Any:
    """The answer to a GET, or to a POST of a body."""
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    return urllib.request.urlopen(urllib.request.Request(address, data, headers))


def ask(address: str, model: str, prompt: list[int], num: int, begin_s: float) -> dict[str, Any]:
    """Send one request, and read its stream."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": num,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    text, record = "", dict[str, Any]()
    with opened(f"{address}/completions", body) as answer:
        for line in answer:
            name, _, data = line.decode().partition(":")
            if name != "data" or data.strip() == "[DONE]":
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                raise RuntimeError(chunk["error"])
            if usage := chunk.get("usage"):
                record["num_tokens"] = usage["completion_tokens"]
                details = usage.get("prompt_tokens_details") or {}
                record["cached"] = details.get("cached_tokens") or 0
            for choice in chunk.get("choices") or ():
                if choice.get("text"):
                    record.setdefault("first_s", time.monotonic() - begin_s)
                    text += choice["text"]
    return record | {"text": text, "end_s": time.monotonic() - begin_s}


def main() -> None:
    """Answer runs until the input ends; see enginebay_bench.compare.engine_process."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    address = sys.argv[1].rstrip("/").removesuffix("/v1") + "/v1"
    with opened(f"{address}/models") as found:
        models = [one["id"] for one in json.load(found)["data"]]
    model = sys.argv[2] if len(sys.argv) > 2 else models[0]

    def write(record: object) -> None:
        answers.write(json.dumps(record) + "\n")
        answers.flush()

    write({"ready": {"name": f"{model} at {address}", "local": False}})
    with concurrent.futures.ThreadPoolExecutor(256) as pool:
        for line in sys.stdin:
            asked, begin_s = json.loads(line), time.monotonic()
            each = zip(asked["prompts"], asked["new_tokens"], strict=True)
            waits = [pool.submit(ask, address, model, *one, begin_s) for one in each]
            write({"id": asked["id"], "requests": [wait.result() for wait in waits]})


if __name__ == "__main__":
    main()
