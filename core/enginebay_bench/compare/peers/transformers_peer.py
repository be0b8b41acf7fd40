"""Answers runs with transformers: python transformers_peer.py MODEL DTYPE. Needs torch."""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    """Answer runs until the input ends; see enginebay_bench.compare.engine_process."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    import torch
    import transformers

    model_name, dtype = sys.argv[1:3]
    start_s = time.monotonic()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_name, dtype=getattr(torch, dtype)
    )
    model.eval()

    class FirstToken(transformers.generation.streamers.BaseStreamer):
        """Notes when the first token is there."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: object) -> None:
            self.times.append(time.monotonic())

        def end(self) -> None:
            pass

    def write(record: object) -> None:
        answers.write(json.dumps(record) + "\n")
        answers.flush()

    def run(prompts: list[list[int]], new_tokens: list[int]) -> list[dict[str, object]]:
        """Answers together, padded on the left, until the longest is done."""
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        begin_s, each = time.monotonic(), FirstToken()
        options = {"streamer": each} if len(prompts) == 1 else {}
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=max(new_tokens),
                min_new_tokens=max(new_tokens),
                pad_token_id=0,
                eos_token_id=None,
                **options,
            )
        end_s = time.monotonic() - begin_s
        # The prompt is put first. A batch is not streamed, so its first tokens have no time.
        first = {"first_s": each.times[1] - begin_s} if len(each.times) > 1 else {}
        return [
            {"token_ids": found[:num], "end_s": end_s, **first}
            for found, num in zip(out[:, longest:].tolist(), new_tokens, strict=True)
        ]

    write(
        {
            "ready": {
                "name": f"transformers {transformers.__version__}, torch {torch.__version__}",
                "platform": "cpu",
                "dtype": dtype,
                "num_token_ids": model.config.get_text_config().vocab_size,
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
