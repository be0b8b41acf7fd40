"""Answers runs with llama.cpp: python llama_cpp_peer.py FILE CONTEXT. Needs llama-cpp-python."""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    """Answer runs until the input ends, the requests of a run one after the other; see
    enginebay_bench.compare.engine_process.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    import llama_cpp

    start_s = time.monotonic()
    model = llama_cpp.Llama(
        sys.argv[1],
        n_ctx=int(sys.argv[2]),
        n_threads=os.cpu_count(),
        n_threads_batch=os.cpu_count(),
        verbose=False,
    )

    def write(record: object) -> None:
        answers.write(json.dumps(record) + "\n")
        answers.flush()

    def run(prompts: list[list[int]], new_tokens: list[int]) -> list[dict[str, object]]:
        begin_s, records = time.monotonic(), []
        for prompt, num in zip(prompts, new_tokens, strict=True):
            model.reset()
            token_ids: list[int] = []
            first_s = 0.0
            for token in model.generate(prompt, temp=0.0, repeat_penalty=1.0):
                if not token_ids:
                    first_s = time.monotonic() - begin_s
                token_ids.append(int(token))
                if len(token_ids) == num:
                    break
            end_s = time.monotonic() - begin_s
            records.append({"token_ids": token_ids, "first_s": first_s, "end_s": end_s})
        return records

    write(
        {
            "ready": {
                "name": f"llama.cpp (llama-cpp-python {llama_cpp.__version__})",
                "platform": "cpu",
                "num_token_ids": model.n_vocab(),
                "compile_s": 0.0,
                "load_s": time.monotonic() - start_s,
            }
        }
    )
    for line in sys.stdin:
        asked = json.loads(line)
        found = run(asked["prompts"], asked["new_tokens"])
        write({"id": asked["id"], "requests": found})


if __name__ == "__main__":
    main()
