"""Answers runs with vLLM: python vllm_peer.py MODEL DTYPE. Needs vllm."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

MAX_CONTEXT = 4096
"""Longer contexts of a model are cut to this many tokens, so that the cache has room for rows."""


def main() -> None:
    """Answer runs until the input ends; see enginebay_bench.compare.engine_process."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # On a CPU vLLM reserves nearly all memory otherwise, and does not start beside other engines.
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GB
    import vllm
    from vllm.platforms import current_platform

    model, dtype = sys.argv[1:3]
    config = json.loads(Path(model, "config.json").read_text(encoding="utf-8"))
    start_s = time.monotonic()
    engine = vllm.LLM(
        model,
        dtype=dtype,
        enable_prefix_caching=False,
        disable_log_stats=False,
        max_model_len=min(MAX_CONTEXT, config.get("max_position_embeddings", MAX_CONTEXT)),
    )

    def write(record: object) -> None:
        answers.write(json.dumps(record) + "\n")
        answers.flush()

    def run(prompts: list[list[int]], new_tokens: list[int]) -> list[dict[str, object]]:
        params = [
            vllm.SamplingParams(
                temperature=0.0, max_tokens=num, min_tokens=num, ignore_eos=True, detokenize=False
            )
            for num in new_tokens
        ]
        begin_s = time.monotonic()
        found = engine.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )
        end_s = time.monotonic() - begin_s
        records: list[dict[str, object]] = []
        for one in found:
            record: dict[str, object] = {"token_ids": list(one.outputs[0].token_ids)}
            record |= {"end_s": end_s, "cached": one.num_cached_tokens or 0}
            latency_s = getattr(one.metrics, "first_token_latency", 0.0)
            if len(prompts) == 1 and 0 < latency_s < end_s:
                record["first_s"] = latency_s
            records.append(record)
        return records

    write(
        {
            "ready": {
                "name": f"vLLM {vllm.__version__}",
                "platform": str(current_platform.device_type),
                "dtype": dtype,
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
